"""What a successor of this service needs to know of a box, in a file each.

Owns: the folder of records. Promise: a record is written whole or not at all; one that cannot be
read is no record, and its box is swept. Only boxes with a note have one: the others end with their
service. Does not cover: which of them live (backend.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from muster import telemetry
from muster.types import Limits
from services.sandbox.adapters.docker.transfer import Carried
from services.sandbox.box import KeptStep

_log = telemetry.logger("muster.sandbox")


class Record(msgspec.Struct):
    """layer, user: what the box was started from. trusted: the image that its verifier starts from;
    carried: what agents left in snapshots between that and the box."""

    box: str
    container: str
    limits: Limits
    trusted: str
    carried: Carried = Carried()
    user: str = ""
    layer: str = ""
    cwd: str = "/"
    env: dict[str, str] = {}
    note: bytes = b""
    kept: list[KeptStep] = []
    running: tuple[int, str] | None = None
    newest_turn: int = -1
    sealed: bool = False


class Records:
    """In `folder`, which is made."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, record: Record) -> None:
        """The newest state of a box that has a note."""
        if not record.note:
            return
        path = self._path(record.container)
        part = path.with_suffix(".part")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(record))
        part.replace(path)

    def forget(self, container: str) -> None:
        if container:
            self._path(container).unlink(missing_ok=True)

    def load(self) -> dict[str, Record]:
        """Container → its record, of all that can be read."""
        found = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                found[path.stem] = msgspec.json.decode(path.read_bytes(), type=Record)
            except (OSError, msgspec.MsgspecError) as error:
                _log.warning("the record %s of a box cannot be read: %s", path.name, error)
        return found

    def _path(self, container: str) -> Path:
        return self._folder / f"{container}.json"
