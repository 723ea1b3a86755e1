"""Containers of a Docker Engine behind the contract of `services.sandbox.box.Backend`.

Owns: the containers and images labelled with this instance. Promise: a failed start leaves
nothing; an orderly end leaves nothing; after a kill the next service of the same runtime_dir takes
over the boxes that have a note and in which no step ran, and removes the rest. A box is told as
broken only when a limit of its own struck, its own shell is gone, or its processes survived every
kill; an engine that is late, away or restarted is BoxFailure. No container is given the engine's
socket, a folder of the host or a network.

Not bounded as in a native box: files are bounded in bytes by the storage driver where it can
(overlay2 on XFS with project quotas), else a step is ended within about half a second of passing
the limit, and what it wrote until then is the overshoot; the number of files is not bounded.
"""

from __future__ import annotations

import asyncio
import posixpath
from dataclasses import dataclass

import msgspec

from muster import telemetry
from muster.archive import TaskFile
from muster.types import Limits
from services.sandbox.adapters.docker import copies, placing, sessions, shell, steps, verifier
from services.sandbox.adapters.docker.counters import Groups
from services.sandbox.adapters.docker.engine import Absent, Engine, EngineTrouble, Labels
from services.sandbox.adapters.docker.images import Images, Setup
from services.sandbox.adapters.docker.layers import Layers, Origin
from services.sandbox.adapters.docker.records import Found, Record, Records
from services.sandbox.adapters.docker.shell import Session
from services.sandbox.adapters.docker.starting import Starter
from services.sandbox.adapters.docker.steps import NotBegun, Place, Unkillable
from services.sandbox.bases import Bases
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

_log = telemetry.logger("muster.sandbox")


@dataclass
class _Box:
    place: Place
    record: Record
    broken: str = ""

    @property
    def session(self) -> Session:
        return Session(self.record.cwd, self.record.env)


class DockerBackend:
    """Boxes of one instance."""

    def __init__(self, engine: Engine, records: Records, setup: Setup):
        self.engine, self.setup = engine, setup
        self._records = records
        self._starter = Starter(engine, setup.boots)
        self._images = Images(engine, setup, self._labels("", "built"))
        self._layers = Layers(engine, setup.instance, self._labels("", "layer"))
        self._boxes: dict[str, _Box] = {}
        self._survivors: tuple[Survivor, ...] = ()
        self._orphans: dict[str, set[str]] = {}  # survivor → images that only survivors use
        self._made = 0

    @property
    def tells_stall(self) -> bool:
        return self.setup.tells_stall

    @property
    def builds(self) -> bool:
        return True

    @property
    def bases(self) -> Bases:
        """What an image that a FROM names is taken from; the names are ids of images."""
        return self.setup.bases

    def _labels(self, box: str, role: str) -> Labels:
        own = {placing.INSTANCE: self.setup.instance, placing.ROLE: role}
        return own | ({placing.BOX: box} if box else {})

    # --- starting and ending -------------------------------------------------------------------

    async def build(self, content: str, context: dict[str, TaskFile], timeout_s: float) -> Source:
        return await self._images.build(content, context, timeout_s)

    async def start(self, box: str, limits: Limits, source: Source = HOST) -> None:
        if box in self._boxes:
            raise BoxFailure(f"box {box} exists")
        found = await self._origin(source)
        # The name is taken from here on, so that two starts do not meet.
        record = Record(
            box, "", limits, found.trusted, found.carried, found.user, found.layer,
            found.session.cwd, dict(found.session.env),
        )  # fmt: skip
        self._boxes[box] = _Box(Place(self.engine, "", limits, Groups()), record)
        try:
            self._boxes[box].place = await self._launch(box, "box", limits, found.image, found.user)
        except BaseException:
            del self._boxes[box]
            raise
        record.container = self._boxes[box].place.container

    async def _origin(self, source: Source) -> Origin:
        if source.layer:
            return self._layers.origin(source.layer)
        return await self._images.origin(source.base)

    async def _launch(
        self, box: str, role: str, limits: Limits, image: str, user: str, network: str = "none"
    ) -> Place:
        """A running container, or nothing of it."""
        config = placing.container(
            image, limits, self._labels(box, role), self.setup.life_s,
            network=network, quota=self.setup.quota,
        )  # fmt: skip
        self._made += 1
        name = f"muster-{self.setup.instance}-{box}"
        container = await self._starter.start(name, config)
        groups = await asyncio.to_thread(Groups, container)
        return Place(self.engine, container, limits, groups, user, self.setup.quota)

    def _known(self, box: str) -> _Box:
        if box not in self._boxes or not self._boxes[box].place.container:
            raise BoxFailure(f"there is no box {box}")
        return self._boxes[box]

    def _live(self, box: str) -> _Box:
        found = self._known(box)
        if found.record.sealed:
            raise BoxFailure(f"{box} is sealed")
        return found

    async def alive(self, box: str) -> bool:
        if box not in self._boxes or self._boxes[box].record.sealed or self._boxes[box].broken:
            return False
        try:
            state = (await self.engine.inspect(self._known(box).place.container))["State"]
        except Absent:
            return False
        return bool(state["Running"]) and not state["Paused"]

    async def end(self, box: str) -> bool:
        if box not in self._boxes:
            return False
        found = self._known(box)
        existed = await self.engine.remove(found.place.container)
        await asyncio.to_thread(self._records.forget, found.place.container)
        self._boxes.pop(box, None)
        for image in self._orphans.pop(box, set()) - set().union(*self._orphans.values()):
            await self._forget_image(image)
        return existed

    async def _forget_image(self, image: str) -> None:
        try:
            await self.engine.remove_image(image)
        except EngineTrouble as trouble:  # another box is in it: the next service sweeps it
            _log.info("the image %s stays for now: %s", image, trouble)

    # --- files and session ---------------------------------------------------------------------

    def counters(self, box: str) -> tuple[bool, bool]:
        """Whether the kernel's counters of a box show here, and pressure stall among them."""
        groups = self._known(box).place.groups
        return groups.shown, groups.tell_stall

    def forget_all(self) -> None:
        """Let go of the boxes, which have ended."""
        for found in self._boxes.values():
            self._records.forget(found.place.container)
        self._boxes.clear()

    async def put(self, box: str, files: tuple[PutFile, ...]) -> None:
        if files:
            place = self._live(box).place
            await self.engine.put(place.container, "/", verifier.tar_of(files))

    async def set_session(self, box: str, cwd: str, env: dict[str, str]) -> None:
        """In a box that stands on no snapshot, over what its image says of itself."""
        found = self._live(box)
        record, container = found.record, found.place.container
        session = Session(cwd, dict(env))
        if not record.layer:
            image = await self._images.session(record.trusted)
            session = sessions.entered(image, record.user, cwd, env)
        cwd = session.cwd
        if posixpath.normpath(cwd) != "/" and await self.engine.stat(container, cwd) is None:
            await self.engine.put(container, "/", verifier.tar_of((), (cwd,)))
        record.cwd, record.env = cwd, dict(session.env)
        await self._records.save(record)

    async def copy_in(self, box: str, folder: str, files: tuple[CopiedFile, ...]) -> None:
        await copies.copy_in(self._live(box).place, folder, files)

    async def copy_out(self, box: str, path: str, bytes_max: int) -> tuple[CopiedFile, ...]:
        return await copies.copy_out(self._live(box).place, path, bytes_max)

    # --- steps ---------------------------------------------------------------------------------

    async def run(self, box: str, command: str, timeout_s: float, turn: int = -1) -> Evidence:
        found = self._live(box)
        record = found.record
        if turn >= 0:
            record.running, record.newest_turn = (turn, command), max(turn, record.newest_turn)
            await self._records.save(record)
        evidence = await self._step(box, found, command, timeout_s)
        record.running = None
        if turn >= 0:
            await self._records.keep(record, KeptStep(turn, command, evidence))
        else:
            await self._records.save(record)
        return evidence

    async def _step(self, box: str, found: _Box, command: str, timeout_s: float) -> Evidence:
        if found.broken:
            return Evidence(exit_code=137, broken=found.broken)
        before, session = found.place.groups.read(), found.session
        try:
            evidence, left = await steps.run(
                found.place, lambda token: shell.step(command, token, session), session, timeout_s
            )
        except Unkillable as problem:
            found.broken = str(problem)
            await self.engine.stop(found.place.container)
            return Evidence(
                exit_code=137, signal=9, timed_out=True, wall_s=timeout_s, broken=found.broken
            )
        except NotBegun as problem:
            if not await self._spoiled(found, problem.evidence):
                raise BoxFailure(f"the shell of a step did not start: {problem}") from problem
            return msgspec.structs.replace(
                problem.evidence, exit_code=137, broken=f"no shell starts any more: {problem}",
                head=b"", tail=b"", total=0,
            )  # fmt: skip
        except EngineTrouble:
            counted = found.place.groups.read().since(before)
            if not counted.oom_kills or await self.alive(box):
                raise
            found.broken = "the box's memory limit ended its first process"
            return Evidence(exit_code=137, oom_kills=counted.oom_kills, broken=found.broken)
        found.record.cwd, found.record.env = left.cwd, dict(left.env)
        return evidence

    async def _spoiled(self, found: _Box, evidence: Evidence) -> bool:
        """Whether it is the agent's doing that no shell starts: a limit struck, or bash is gone."""
        if evidence.pids_refused or evidence.oom_kills:
            return True
        for path in (shell.BASH, f"/usr{shell.BASH}"):
            lies = await self.engine.stat(found.place.container, path)
            if lies is None or (lies.kind == "file" and not lies.size):
                return True
        return False

    async def seal(self, box: str) -> None:
        found = self._known(box)
        await self.engine.stop(found.place.container)
        found.record.sealed = True
        await self._records.save(found.record)

    # --- verifying -----------------------------------------------------------------------------

    async def judge(self, box: str, spec: JudgeSpec) -> Judgement:
        agent = self._known(box)
        if spec.live and agent.record.sealed:
            raise BoxFailure(f"{box} is sealed")
        if not spec.live and not agent.record.sealed:
            raise BoxFailure(f"{box} is not sealed")
        record, name = agent.record, f"{box}.v{self._made}"
        image = await self._images.session(record.trusted)
        session = sessions.of_verifier(image, spec.cwd, spec.env)
        spec = msgspec.structs.replace(spec, cwd=session.cwd, env=session.env)
        network = f"container:{agent.place.container}" if spec.live else "none"
        place = await self._launch(
            name, "verifier", spec.limits, record.trusted, record.user, network
        )
        try:
            if spec.live:
                await verifier.clear(place)
            else:
                await verifier.carry(agent.place, record.carried, place, self.setup.scratch)
            return await verifier.judge(place, spec)
        finally:
            await self._starter.discard(place.container)

    # --- snapshots -----------------------------------------------------------------------------

    async def snapshot(self, box: str, layer: str, *, keep: bool) -> Snapshot:
        found = self._live(box)
        self._layers.check_free(layer)
        if not keep:
            await self.engine.stop(found.place.container)
        told = await self._layers.commit(layer, found.record, keep=keep)
        if not keep:
            await self.end(box)
        return told

    async def squash(self, layer: str, into: str) -> Snapshot:
        found = self._layers.get(layer)
        self._layers.check_free(into)
        self._made += 1
        name = f"muster-{self.setup.instance}-squash.{self._made}"
        config = placing.container(
            found.image, Limits(), self._labels("", "squash"), self.setup.life_s,
            network="none", quota=False,
        )  # fmt: skip
        container = await self.engine.create(name, config)
        try:
            return await self._layers.squash(layer, into, container)
        finally:
            await self._starter.discard(container)

    async def drop(self, layer: str) -> bool:
        if not self._layers.has(layer):
            return await self._images.drop(layer)
        used = {found.record.layer for found in self._boxes.values()}
        return await self._layers.drop(layer, used)

    # --- a former service's boxes --------------------------------------------------------------

    async def note(self, box: str, data: bytes, shared: bytes = b"") -> None:
        await self._records.note(self._known(box).record, data, shared)

    async def survivors(self) -> tuple[Survivor, ...]:
        return self._survivors

    async def claim(self, layers: tuple[str, ...]) -> None:
        del layers  # images that only survivors use go with them

    async def stopping(self) -> None:
        """Containers that it cannot end any more, the next start sweeps."""

    async def rejoin(self, box: str) -> Evidence:
        raise BoxFailure(f"no step of {box} runs: such boxes are not taken over")

    def adopt(self, found: Found, groups: Groups, images: set[str]) -> None:
        """Take over a box of a former service. images: of snapshots
        that nobody can start from any more, to go with the last box."""
        record = found.record
        place = Place(
            self.engine, record.container, record.limits, groups, record.user, self.setup.quota
        )
        self._boxes[record.box] = _Box(place, record)
        self._orphans[record.box] = images
        told = Survivor(
            record.box, record.limits, note=found.note, shared=found.shared, kept=found.kept,
            newest_turn=record.newest_turn, sealed=record.sealed,
        )  # fmt: skip
        self._survivors = (*self._survivors, told)
