"""Boxes in memory under the same contract, for the contract tests.

Owns: files, session and background jobs of each box as plain values. Promise: what
tests/contract/test_box.py asks of a backend, for the toy shell of fakeshell.py; no process is
started and no command ever touches the host. Does not cover: isolation, real programs; the setting
`fake` opens scripted.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from muster.types import Limits
from services.sandbox.adapters.fakeshell import Shell, ToyBroken
from services.sandbox.adapters.native.spool import Spool
from services.sandbox.box import BoxFailure, Evidence, Judgement, JudgeSpec, PutFile


class _Box:
    def __init__(self, limits: Limits, files: dict[str, bytes]):
        self.limits, self.shell = limits, Shell(files)
        self.sealed = False
        self.broken = ""


class FakeBackend:
    """`running` lists what exists, for tests that look for leftovers."""

    def __init__(self) -> None:
        self._boxes: dict[str, _Box] = {}
        self.fail_starts = 0  # the next so many starts fail
        self.fail_ends = 0  # and ends: the box stays
        self.fail_steps = 0  # and steps, a verifier's too: their results are lost

    @property
    def tells_stall(self) -> bool:
        return False

    @property
    def running(self) -> list[str]:
        return sorted(self._boxes)

    async def start(self, box: str, limits: Limits) -> None:
        if box in self._boxes:
            raise BoxFailure(f"box {box} exists")
        if self.fail_starts:
            self.fail_starts -= 1
            raise BoxFailure("told to fail")
        self._boxes[box] = _Box(limits, {})

    def _live(self, box: str) -> _Box:
        if box not in self._boxes:
            raise BoxFailure(f"there is no box {box}")
        return self._boxes[box]

    async def put(self, box: str, files: tuple[PutFile, ...]) -> None:
        self._live(box).shell.files |= {file.path: file.data for file in files}

    async def set_session(self, box: str, cwd: str, env: dict[str, str]) -> None:
        shell = self._live(box).shell
        shell.cwd, shell.env = cwd, dict(env)

    async def run(self, box: str, command: str, timeout_s: float) -> Evidence:
        found = self._live(box)
        if found.sealed:
            raise BoxFailure(f"{box} is sealed")
        if found.broken:
            return Evidence(exit_code=137, broken=found.broken)
        return await self._run(found, command, timeout_s)

    async def _run(self, box: _Box, command: str, timeout_s: float) -> Evidence:
        if self.fail_steps:
            self.fail_steps -= 1
            raise BoxFailure("told to fail")
        before = msgspec.json.encode((box.shell.cwd, box.shell.env))
        try:
            result = box.shell.run(command, timeout_s)
        except ToyBroken as broken:
            box.broken = str(broken)
            return Evidence(exit_code=137, broken=box.broken)
        await asyncio.sleep(0)
        spool = Spool(box.limits.output_bytes)
        spool.add(result.output)
        if result.timed_out:
            box.shell.cwd, box.shell.env = msgspec.json.decode(
                before, type=tuple[str, dict[str, str]]
            )
        full = sum(len(data) for data in box.shell.files.values()) >= box.limits.disk_bytes
        return Evidence(
            exit_code=137 if result.timed_out else result.code,
            signal=9 if result.timed_out else 0,
            timed_out=result.timed_out,
            disk_full=full,
            wall_s=min(result.took_s, timeout_s),
            head=spool.head,
            tail=spool.tail,
            total=spool.total,
        )

    async def seal(self, box: str) -> None:
        self._live(box).sealed = True

    async def judge(self, box: str, spec: JudgeSpec) -> Judgement:
        agent = self._live(box)
        if not agent.sealed:
            raise BoxFailure(f"{box} is not sealed")
        hidden = ("/tests/", "/logs/", "/etc/")
        files = {p: d for p, d in agent.shell.files.items() if not p.startswith(hidden)}
        verifier = _Box(spec.limits, files | {file.path: file.data for file in spec.files})
        verifier.shell.cwd, verifier.shell.env = spec.cwd, dict(spec.env)
        script = verifier.shell.files.get(spec.script)
        if script is None:
            return Judgement(Evidence(exit_code=127))
        evidence = await self._run(verifier, script.decode(), spec.timeout_s)
        folder = "/logs/verifier/"
        found = {
            name: verifier.shell.files[folder + name]
            for name in ("reward.json", "reward.txt")
            if folder + name in verifier.shell.files
        }
        return Judgement(evidence, found)

    async def end(self, box: str) -> bool:
        if self.fail_ends:
            self.fail_ends -= 1
            raise BoxFailure("told to fail")
        return self._boxes.pop(box, None) is not None


@asynccontextmanager
async def open_fake() -> AsyncIterator[FakeBackend]:
    """A backend whose boxes end with the block."""
    backend = FakeBackend()
    yield backend
    backend._boxes.clear()
