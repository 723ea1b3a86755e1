"""What a successor of this service needs to know of a box: a folder of small files each.

Owns: those folders. Promise: a file is written whole or not at all, apart from the event loop, in
the order asked for; a box whose record cannot be read has none, and is swept. Only boxes with a
note have one: the others end with their service. Kept answers lie in a file each, so many bytes in
all; what many notes share lies there once. Does not cover: which boxes live (backend.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import threading
from collections import defaultdict
from pathlib import Path

import msgspec

from muster import telemetry
from muster.types import Limits
from services.sandbox.adapters.docker.transfer import Carried
from services.sandbox.box import KeptStep

_log = telemetry.logger("muster.sandbox")
_KEPT_BYTES = 8 << 20  # of all answers but the newest
_STATE, _NOTE, _SHARED = "state", "note", "shared"


class Record(msgspec.Struct):
    """layer, user: what the box was started from. trusted: the image that its verifier starts from;
    carried: what agents left in snapshots between that and the box. shared: names what its note
    shares with others."""

    box: str
    container: str
    limits: Limits
    trusted: str
    carried: Carried = Carried()
    user: str = ""
    layer: str = ""
    cwd: str = "/"
    env: dict[str, str] = {}
    shared: str = ""
    running: tuple[int, str] | None = None
    newest_turn: int = -1
    sealed: bool = False


class Found(msgspec.Struct):
    """A record as a former service left it, with its note and its answers, oldest first."""

    record: Record
    note: bytes
    shared: bytes
    kept: tuple[KeptStep, ...]


class Records:
    """In `folder`, which is made. answers_kept: of one box."""

    def __init__(self, folder: Path, answers_kept: int = 16):
        self._folder, self._kept_max = folder, answers_kept
        self._sizes: dict[str, dict[int, int]] = {}  # container → turn → bytes of its answer
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._users: dict[str, str] = {}  # container → what it shares
        self._writing = threading.Lock()  # a box that was forgotten is written no more
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def note(self, record: Record, data: bytes, shared: bytes) -> None:
        """The newest note of a box, which has a record from now on."""
        record.shared = hashlib.sha256(shared).hexdigest() if shared else ""
        self._sizes.setdefault(record.container, {})
        self._users[record.container] = record.shared
        files = {Path(_SHARED) / record.shared: shared} if shared else {}
        await self._written(record, files | {Path(record.container) / _NOTE: data})

    async def save(self, record: Record) -> None:
        """The newest state of a box that has a note."""
        if record.container in self._sizes:
            await self._written(record, {})

    async def keep(self, record: Record, step: KeptStep) -> None:
        """The answer of a step, and the state that it left."""
        sizes = self._sizes.get(record.container)
        if sizes is None:
            return
        data = msgspec.msgpack.encode(step)
        folder = Path(record.container)
        await self._written(record, {folder / str(step.turn): data})
        sizes[step.turn] = len(data)
        while len(sizes) > 1 and (
            len(sizes) > self._kept_max or sum(sizes.values()) > _KEPT_BYTES + len(data)
        ):
            oldest = min(sizes)
            del sizes[oldest]
            (self._folder / folder / str(oldest)).unlink(missing_ok=True)

    async def _written(self, record: Record, files: dict[Path, bytes]) -> None:
        async with self._turns[record.container]:
            state = {Path(record.container) / _STATE: msgspec.msgpack.encode(record)}
            await asyncio.to_thread(self._write, record.container, files | state)

    def _write(self, container: str, files: dict[Path, bytes]) -> None:
        with self._writing:
            for name, data in files.items() if container in self._sizes else ():
                self._write_one(self._folder / name, data)

    def _write_one(self, path: Path, data: bytes) -> None:
        if path.parent.name == _SHARED and path.exists():
            return
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        part.replace(path)

    def forget(self, container: str) -> None:
        """The box is gone; with the last that shares something, that goes too."""
        if not container:
            return
        with self._writing:
            shared = self._users.pop(container, "")
            self._sizes.pop(container, None)
            self._turns.pop(container, None)
            shutil.rmtree(self._folder / container, ignore_errors=True)
            if shared and shared not in self._users.values():
                (self._folder / _SHARED / shared).unlink(missing_ok=True)

    def load(self) -> dict[str, Found]:
        """Container → what is known of it, of all that can be read; the rest is removed."""
        found: dict[str, Found] = {}
        for path in sorted(self._folder.iterdir()):
            if path.name == _SHARED:
                continue
            try:
                found[path.name] = self._read(path)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                _log.warning("the record of container %s cannot be read: %s", path.name, error)
                shutil.rmtree(path, ignore_errors=True)
        self._users = {name: one.record.shared for name, one in found.items()}
        used = set(self._users.values())
        for path in (self._folder / _SHARED).glob("*"):
            if path.name not in used:
                path.unlink()
        return found

    def _read(self, folder: Path) -> Found:
        record = msgspec.msgpack.decode((folder / _STATE).read_bytes(), type=Record)
        shared = (self._folder / _SHARED / record.shared).read_bytes() if record.shared else b""
        turns = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
        sizes, kept = {}, []
        for turn in turns:
            data = (folder / str(turn)).read_bytes()
            sizes[turn] = len(data)
            kept.append(msgspec.msgpack.decode(data, type=KeptStep))
        self._sizes[folder.name] = sizes
        return Found(record, (folder / _NOTE).read_bytes(), shared, tuple(kept))
