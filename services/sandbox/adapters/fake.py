"""Boxes in memory, for tests without root: same contract as the native backend.

Owns: files, session and snapshots of each box as plain values. Promise: what
tests/contract/test_box.py asks of a backend, for the toy shell of fakeshell.py; no process is
started and no command ever touches the host. Boxes stay when a host that used them goes away, so
that another one over the same backend finds them. Does not cover: isolation, real programs; the
setting `fake` opens scripted.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from muster.archive import TaskFile
from muster.errors import InvalidInput
from muster.types import Limits
from services.sandbox.adapters.fakeshell import Shell, ToyBroken
from services.sandbox.adapters.native.spool import Spool
from services.sandbox.box import (
    HOST,
    BoxFailure,
    CopiedFile,
    Evidence,
    Judgement,
    JudgeSpec,
    KeptStep,
    PutFile,
    Snapshot,
    Source,
    Survivor,
)

_KEPT = 16
_IMAGE = "image:"  # before the content of what was built
_HIDDEN = ("/tests/", "/logs/", "/etc/")  # of the agent's files, from its verifier


class _Layer:
    """All files of a snapshot, those that an agent had no hand in, and what it stands on.

    set_ups: the snapshots that the latter are from, which stay as long as this one.
    """

    def __init__(self, name: str, box: _Box, *, keep: bool):
        self.name, self.under = name, box.under
        self.files = dict(box.shell.files)
        self.trusted = dict(box.trusted if keep else box.shell.files)
        self.set_ups = box.set_ups if keep else (*box.set_ups, name)
        size = sum(len(data) for data in self.files.values())
        self.told = Snapshot(size, box.depth + 1, box.shell.cwd, dict(box.shell.env))


class _Box:
    def __init__(self, limits: Limits, layer: _Layer | None):
        self.limits = limits
        self.shell: Shell = Shell(dict(layer.files) if layer else {})
        self.trusted: dict[str, bytes] = dict(layer.trusted) if layer else {}
        self.under: str = layer.name if layer else ""
        self.set_ups: tuple[str, ...] = layer.set_ups if layer else ()
        self.depth: int = layer.told.depth if layer else 0
        self.sealed = False
        self.broken = ""
        self.note = self.shared = b""
        self.kept: list[KeptStep] = []


class FakeBackend:
    """`running` lists what exists, for tests that look for leftovers.

    builds: whether it builds Dockerfiles: what it builds is empty, and says how often it was.
    """

    def __init__(self, *, builds: bool = False) -> None:
        self._builds, self.built = builds, 0
        self._boxes: dict[str, _Box] = {}
        self._layers: dict[str, _Layer] = {}
        self._orphans: set[str] = set()  # of a former service, claimed by nobody
        self.fail_starts = 0  # the next so many starts fail
        self.fail_ends = 0  # and ends: the box stays
        self.fail_steps = 0  # and steps, a verifier's too: their results are lost
        self.fail_snapshots = 0
        self.fail_notes = 0
        self.dead: set[str] = set()  # boxes that are not alive any more
        self.begun: dict[str, tuple[int, str]] = {}  # steps that run on without their host

    @property
    def tells_stall(self) -> bool:
        return False

    @property
    def builds(self) -> bool:
        return self._builds

    @property
    def running(self) -> list[str]:
        return sorted(self._boxes)

    @property
    def layers(self) -> list[str]:
        return sorted(self._layers)

    async def build(self, content: str, context: dict[str, TaskFile], timeout_s: float) -> Source:
        del context, timeout_s
        if not self._builds:
            raise BoxFailure(f"this backend builds no Dockerfile ({content})")
        self.built += 1
        self._layers[content] = _Layer(content, _Box(Limits(), None), keep=False)
        return Source(f"{_IMAGE}{content}")

    async def start(self, box: str, limits: Limits, source: Source = HOST) -> None:
        if box in self._boxes:
            raise BoxFailure(f"box {box} exists")
        if self.fail_starts:
            self.fail_starts -= 1
            raise BoxFailure("told to fail")
        image = source.base.removeprefix(_IMAGE) if source.base.startswith(_IMAGE) else ""
        under = source.layer or image
        self._boxes[box] = _Box(limits, self._layer(under) if under else None)

    async def alive(self, box: str) -> bool:
        found = self._boxes.get(box)
        return found is not None and not (found.broken or found.sealed or box in self.dead)

    async def snapshot(self, box: str, layer: str, *, keep: bool) -> Snapshot:
        found = self._live(box)
        if found.sealed or layer in self._layers:
            raise BoxFailure(f"{box} is sealed" if found.sealed else f"snapshot {layer} exists")
        if self.fail_snapshots:
            self.fail_snapshots -= 1
            raise BoxFailure("told to fail")
        made = self._layers[layer] = _Layer(layer, found, keep=keep)
        if not keep:
            del self._boxes[box]
        return made.told

    async def squash(self, layer: str, into: str) -> Snapshot:
        found = self._layer(layer)
        if into in self._layers:
            raise BoxFailure(f"snapshot {into} exists")
        made = _Layer.__new__(_Layer)
        made.name, made.under = into, ""
        made.files, made.trusted = dict(found.files), dict(found.trusted)
        made.set_ups = (into,) if layer in found.set_ups else found.set_ups
        made.told = msgspec.structs.replace(found.told, depth=1)
        self._layers[into] = made
        return made.told

    async def claim(self, layers: tuple[str, ...]) -> None:
        self._orphans = set(self._layers).difference(layers)
        await self._tidy()

    async def _tidy(self) -> None:
        """Snapshots that nobody has claimed go once nothing stands on them."""
        for layer in sorted(self._orphans, reverse=True):
            with contextlib.suppress(BoxFailure):
                await self.drop(layer)
                self._orphans.discard(layer)

    async def drop(self, layer: str) -> bool:
        users = [name for name, box in self._boxes.items() if box.under == layer]
        users += [
            name
            for name, other in self._layers.items()
            if name != layer and layer in (other.under, *other.set_ups)
        ]
        if users:
            raise BoxFailure(f"snapshot {layer} is in use by {users[0]}")
        return self._layers.pop(layer, None) is not None

    async def copy_in(self, box: str, folder: str, files: tuple[CopiedFile, ...]) -> None:
        held = self._live(box).shell.files
        for file in files:
            if file.kind == "file":
                held[posixpath.normpath(posixpath.join(folder, file.path))] = file.data

    async def copy_out(self, box: str, path: str, bytes_max: int) -> tuple[CopiedFile, ...]:
        held = self._live(box).shell.files
        top, name = posixpath.normpath(path), posixpath.basename(posixpath.normpath(path))
        found = {name + p[len(top) :]: d for p, d in held.items() if p.startswith(top + "/")}
        if top in held:
            found[name] = held[top]
        if not found or sum(map(len, found.values())) > bytes_max:
            problem = "is too large" if found else "is not there"
            raise InvalidInput(f"{path} {problem}", field="path", value=path, way_out="look at it")
        folder = () if top in held else (CopiedFile(name, "folder", 0o755),)
        return (*folder, *(CopiedFile(p, data=found[p]) for p in sorted(found)))

    async def note(self, box: str, data: bytes, shared: bytes = b"") -> None:
        if self.fail_notes:
            self.fail_notes -= 1
            raise BoxFailure("told to fail")
        found = self._live(box)
        found.note, found.shared = data, shared

    async def survivors(self) -> tuple[Survivor, ...]:
        found = []
        for name, box in self._boxes.items():
            running = self.begun.get(name)
            turns = [step.turn for step in box.kept] + ([running[0]] if running else [])
            newest = max(turns, default=-1)
            found.append(
                Survivor(
                    name,
                    box.limits,
                    box.note,
                    tuple(box.kept),
                    running,
                    newest,
                    box.sealed,
                    box.shared,
                )
            )
        return tuple(found)

    async def stopping(self) -> None:
        """Nothing outlives it in any case."""

    async def rejoin(self, box: str) -> Evidence:
        turn, command = self.begun.pop(box)
        return await self.run(box, command, 60.0, turn)

    def _live(self, box: str) -> _Box:
        if box not in self._boxes:
            raise BoxFailure(f"there is no box {box}")
        return self._boxes[box]

    def _layer(self, name: str) -> _Layer:
        if name not in self._layers:
            raise BoxFailure(f"there is no snapshot {name}")
        return self._layers[name]

    async def put(self, box: str, files: tuple[PutFile, ...]) -> None:
        self._live(box).shell.files |= {file.path: file.data for file in files}

    async def set_session(self, box: str, cwd: str, env: dict[str, str]) -> None:
        shell = self._live(box).shell
        shell.cwd, shell.env = cwd, dict(env)

    async def run(self, box: str, command: str, timeout_s: float, turn: int = -1) -> Evidence:
        found = self._live(box)
        if found.sealed:
            raise BoxFailure(f"{box} is sealed")
        if found.broken:
            return Evidence(exit_code=137, broken=found.broken)
        evidence = await self._run(found, command, timeout_s)
        if turn >= 0:
            found.kept = [*found.kept, KeptStep(turn, command, evidence)][-_KEPT:]
        return evidence

    async def _run(self, box: _Box, command: str, timeout_s: float) -> Evidence:
        if self.fail_steps:
            self.fail_steps -= 1
            raise BoxFailure("told to fail")
        before = box.shell.cwd, dict(box.shell.env)
        try:
            result = box.shell.run(command, timeout_s)
        except ToyBroken as broken:
            box.broken = str(broken)
            return Evidence(exit_code=137, broken=box.broken)
        await asyncio.sleep(0)
        spool = Spool(box.limits.output_bytes)
        spool.add(result.output)
        if result.timed_out:
            box.shell.cwd, box.shell.env = before
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
        if not agent.sealed and not spec.live:
            raise BoxFailure(f"{box} is not sealed")
        if agent.sealed and spec.live:
            raise BoxFailure(f"{box} is sealed")
        theirs = {} if spec.live else agent.shell.files
        files = {p: d for p, d in theirs.items() if not p.startswith(_HIDDEN)}
        verifier = _Box(spec.limits, None)
        verifier.shell.files = agent.trusted | files | {file.path: file.data for file in spec.files}
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
        self.dead.discard(box)
        self.begun.pop(box, None)
        existed = self._boxes.pop(box, None) is not None
        await self._tidy()
        return existed


@asynccontextmanager
async def open_fake(*, builds: bool = False) -> AsyncIterator[FakeBackend]:
    """A backend whose boxes end with the block."""
    backend = FakeBackend(builds=builds)
    yield backend
    backend._boxes.clear()
    backend._layers.clear()
