"""A version on its way to an engine, from wherever it comes.

Owns: `Source`, the choice between the transports. Promise: whatever the source, what is returned is
whole and has every digest of the manifest. Does not cover: how they work (receiving.py, stored.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muster.errors import InvalidInput
from muster.transfer.group import GroupSpec
from muster.transfer.manifest import Manifest
from muster.transfer.receiving import Staging, receive
from muster.transfer.stored import StoredSpec, load

Source = GroupSpec | StoredSpec
"""A group of processes that is joined, or a folder that is read."""


def arrive(manifest: Manifest, source: Source, staging: Staging, stored_root: str) -> Any:
    """The version's stream in memory of `staging`, verified; whoever gets it gives it back.

    stored_root: folders below it may be read; empty: none.
    """
    if isinstance(source, GroupSpec):
        return receive(manifest, source, staging)
    if not stored_root:
        raise InvalidInput(
            "this replica reads no stored versions",
            field="inference.stored_root",
            value="",
            way_out="name the folder that trainer and replicas share, or publish directly",
        )
    return load(manifest, source, Path(stored_root), staging)
