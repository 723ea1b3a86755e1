"""Boxes that only pretend: every answer is made up from the commands so far. For tests of others.

Owns: a digest for each box and snapshot. Promise: no process, no delay, no root; the same commands
in the same order give the same exit codes, outputs and reward in any box, so a replay agrees, also
in one forked half-way; every tenth step or so fails; verdicts are about even, and 0 for a box that
ran nothing. Memory does not grow with steps. Does not cover: what a command does (fakeshell.py does
a little, `native` all of it), files, boxes that outlive their service.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from muster.archive import TaskFile
from muster.errors import InvalidInput
from muster.types import Limits
from services.sandbox.box import (
    HOST,
    BoxFailure,
    CopiedFile,
    Evidence,
    Judgement,
    JudgeSpec,
    PutFile,
    Snapshot,
    Source,
    Survivor,
)

_STEP_S = 0.001
_FAILING = 26  # of 256
_SETUP = "exec /bin/sh -c "  # how a task's own RUN lines begin; they succeed and change nothing


class _Box:
    __slots__ = ("depth", "said", "sealed")

    def __init__(self, said: bytes = b"", depth: int = 0) -> None:
        self.said, self.depth, self.sealed = said, depth, False


class ScriptedBackend:
    """See services.sandbox.box.Backend."""

    def __init__(self) -> None:
        self._boxes: dict[str, _Box] = {}
        self._layers: dict[str, _Box] = {}

    @property
    def tells_stall(self) -> bool:
        return True

    @property
    def builds(self) -> bool:
        return False

    async def build(self, content: str, context: dict[str, TaskFile], timeout_s: float) -> Source:
        del context, timeout_s
        raise BoxFailure(f"this backend builds no Dockerfile ({content})")

    async def start(self, box: str, limits: Limits, source: Source = HOST) -> None:
        del limits
        if box in self._boxes:
            raise BoxFailure(f"box {box} exists")
        under = self._layer(source.layer) if source.layer else _Box()
        self._boxes[box] = _Box(under.said, under.depth)

    async def alive(self, box: str) -> bool:
        return box in self._boxes

    async def snapshot(self, box: str, layer: str, *, keep: bool) -> Snapshot:
        found = self._found(box)
        if layer in self._layers:
            raise BoxFailure(f"snapshot {layer} exists")
        self._layers[layer] = _Box(found.said, found.depth + 1)
        if not keep:
            del self._boxes[box]
        return Snapshot(0, found.depth + 1)

    async def squash(self, layer: str, into: str) -> Snapshot:
        self._layers[into] = _Box(self._layer(layer).said, 1)
        return Snapshot(0, 1)

    async def drop(self, layer: str) -> bool:
        return self._layers.pop(layer, None) is not None

    async def copy_in(self, box: str, folder: str, files: tuple[CopiedFile, ...]) -> None:
        del folder, files
        self._found(box)

    async def copy_out(self, box: str, path: str, bytes_max: int) -> tuple[CopiedFile, ...]:
        del bytes_max
        self._found(box)
        way_out = "use real boxes: made-up ones have no files"
        raise InvalidInput(f"{path} is not there", field="path", value=path, way_out=way_out)

    async def note(self, box: str, data: bytes, shared: bytes = b"") -> None:
        del data, shared
        self._found(box)

    async def survivors(self) -> tuple[Survivor, ...]:
        return ()

    async def claim(self, layers: tuple[str, ...]) -> None:
        del layers

    async def stopping(self) -> None:
        """Nothing outlives it in any case."""

    async def rejoin(self, box: str) -> Evidence:
        raise BoxFailure(f"no step runs in {box}")

    async def put(self, box: str, files: tuple[PutFile, ...]) -> None:
        del files
        self._found(box)

    async def set_session(self, box: str, cwd: str, env: dict[str, str]) -> None:
        del cwd, env
        self._found(box)

    async def run(self, box: str, command: str, timeout_s: float, turn: int = -1) -> Evidence:
        del timeout_s, turn
        found = self._found(box)
        if found.sealed:
            raise BoxFailure(f"{box} is sealed")
        if command.startswith(_SETUP):
            return _evidence(0, b"")
        found.said = hashlib.sha256(found.said + command.encode()).digest()
        failed = found.said[0] < _FAILING
        said = b"failed " if failed else b"done "
        return _evidence(int(failed), said + found.said[1:4].hex().encode() + b"\n")

    async def seal(self, box: str) -> None:
        self._found(box).sealed = True

    async def judge(self, box: str, spec: JudgeSpec) -> Judgement:
        found = self._found(box)
        if not found.sealed and not spec.live:
            raise BoxFailure(f"{box} is not sealed")
        passed = bool(found.said) and found.said[4] % 2 == 1
        return Judgement(_evidence(0, b""), {"reward.txt": b"1\n" if passed else b"0\n"})

    async def end(self, box: str) -> bool:
        return self._boxes.pop(box, None) is not None

    def _layer(self, name: str) -> _Box:
        if name not in self._layers:
            raise BoxFailure(f"there is no snapshot {name}")
        return self._layers[name]

    def _found(self, box: str) -> _Box:
        if box not in self._boxes:
            raise BoxFailure(f"there is no box {box}")
        return self._boxes[box]


def _evidence(code: int, output: bytes) -> Evidence:
    return Evidence(
        exit_code=code,
        wall_s=_STEP_S,
        cpu_s=_STEP_S,
        head=output,
        total=len(output),
        cpu_stall_s=0.0,
        memory_stall_s=0.0,
        io_stall_s=0.0,
    )


@asynccontextmanager
async def open_scripted() -> AsyncIterator[ScriptedBackend]:
    """A backend whose boxes end with the block."""
    yield ScriptedBackend()
