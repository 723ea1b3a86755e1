"""A receiver for engines without weights of their own: takes the bytes, verifies, drops them.

Lets a fake replica take part in a real publication. Does not cover: applying anything.
"""

from __future__ import annotations

from muster.errors import MusterError
from muster.transfer import manifest as weights
from muster.transfer.arriving import Source, arrive
from muster.transfer.receiving import Staging


def receive_and_verify(
    manifest: weights.Manifest,
    source: Source,
    staging: Staging | None = None,
    stored_root: str = "",
) -> str:
    """Empty when what arrived is what the manifest says, else what is wrong."""
    staging = staging or Staging()
    try:
        staging.give_back(arrive(manifest, source, staging, stored_root))
    except MusterError as error:
        return str(error)
    return ""
