"""A receiver for engines without weights of their own: takes the bytes, verifies, drops them.

Lets a fake replica take part in a real publication. Does not cover: applying anything.
"""

from __future__ import annotations

from muster.errors import MusterError
from muster.transfer import group as transfer
from muster.transfer import manifest as weights
from muster.transfer.receiving import Staging, receive


def receive_and_verify(
    manifest: weights.Manifest, spec: transfer.GroupSpec, staging: Staging | None = None
) -> str:
    """Empty when what arrived is what the manifest says, else what is wrong."""
    staging = staging or Staging()
    try:
        staging.give_back(receive(manifest, spec, staging))
    except MusterError as error:
        return str(error)
    return ""
