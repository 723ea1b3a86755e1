"""Boxes that only pretend: every answer is made up from the commands so far. For tests of others.

Owns: a digest for each box. Promise: no process, no delay, no root; the same commands in the same
order give the same exit codes, outputs and reward in any box, so a replay agrees; every tenth step
or so fails; verdicts are about even, and 0 for a box that ran nothing. Memory does not grow with
steps. Does not cover: what a command does (fakeshell.py does a little, `native` all of it).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from muster.types import Limits
from services.sandbox.box import BoxFailure, Evidence, Judgement, JudgeSpec, PutFile

_STEP_S = 0.001
_FAILING = 26  # of 256
_SETUP = "exec /bin/sh -c "  # how a task's own RUN lines begin; they succeed and change nothing


class _Box:
    __slots__ = ("said", "sealed")

    def __init__(self) -> None:
        self.said, self.sealed = b"", False


class ScriptedBackend:
    """See services.sandbox.box.Backend."""

    def __init__(self) -> None:
        self._boxes: dict[str, _Box] = {}

    @property
    def tells_stall(self) -> bool:
        return True

    async def start(self, box: str, limits: Limits) -> None:
        del limits
        if box in self._boxes:
            raise BoxFailure(f"box {box} exists")
        self._boxes[box] = _Box()

    async def put(self, box: str, files: tuple[PutFile, ...]) -> None:
        del files
        self._found(box)

    async def set_session(self, box: str, cwd: str, env: dict[str, str]) -> None:
        del cwd, env
        self._found(box)

    async def run(self, box: str, command: str, timeout_s: float) -> Evidence:
        del timeout_s
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
        del spec
        found = self._found(box)
        if not found.sealed:
            raise BoxFailure(f"{box} is not sealed")
        passed = bool(found.said) and found.said[4] % 2 == 1
        return Judgement(_evidence(0, b""), {"reward.txt": b"1\n" if passed else b"0\n"})

    async def end(self, box: str) -> bool:
        return self._boxes.pop(box, None) is not None

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
