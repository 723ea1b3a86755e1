"""Runs boxes for callers: what each call of the service may do, and does.

Owns: nothing beyond the tasks known; the boxes are kept by adapters/orders.py. Promise: a caller
that goes away, or is fenced, changes nothing: its start, step or verification runs on and its
answer is kept for the repeat of the call, by whoever owns the attempt then. A box that the backend
lost is ended and told as NotFound with the field `box`, here and in every later call; any other
trouble of the backend is Unavailable. Neither is a result that could be scored. Boxes that a former
service of this instance left are taken over. Closing ends all boxes.
Does not cover: the wire (server.py), how a box is made (adapters/).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from msgspec.structs import replace

from muster import failpoints
from muster.clock import monotonic
from muster.errors import MusterError, NotFound
from muster.taskset import Task, TaskFile
from muster.types import EpisodeKey, Limits
from services.sandbox import checks, content, events, limits
from services.sandbox.adapters import adoption, archives, hostload, noting, work
from services.sandbox.adapters.callers import (
    Acquired,
    Ask,
    Capacity,
    HostStatus,
    Living,
    UsedBox,
    Verified,
    counted,
    known,
    lost,
    stops,
)
from services.sandbox.adapters.orders import Orders
from services.sandbox.bases import Bases
from services.sandbox.box import Backend
from services.sandbox.config import SandboxConfig
from services.sandbox.content import Setup
from services.sandbox.ledger import Decision, Ledger, StepRecord
from services.sandbox.packages import KnownTasks

_TASKS_KEPT = 64
_BOXES_MAX = 4096
T = TypeVar("T")


class SandboxHost:
    """Use as a context manager; all methods raise MusterError."""

    def __init__(
        self, backend: Backend, config: SandboxConfig, host: str, bases: Bases | None = None
    ):
        """bases: what images stand for here; None: those that every host has."""
        self.host, self.fenced_calls = host, 0
        self._backend, self._config = backend, config
        self._bases = bases or Bases()
        self._most = limits.most(config)
        self._limits_cpu = bool(getattr(backend, "limits_cpu", True))
        self._orders = Orders(backend, config)
        self._pool = self._orders.pool
        self._known = KnownTasks(_TASKS_KEPT)
        self._verifying = asyncio.Semaphore(config.verifying_max)

    async def __aenter__(self) -> Self:
        await self._orders.tasks.__aenter__()
        try:
            await adoption.adopt(self._orders, self._known)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        self._orders.spawn(self._orders.tick(), "sandbox-ticks")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        await self._orders.tasks.__aexit__(kind, error, trace)

    def stop(self) -> None:
        """Answer every caller now, with Unavailable, and refuse new ones; waits for nothing."""
        self._orders.stop()

    @property
    def boxes(self) -> int:
        """Boxes in use."""
        return len(self._orders.boxes)

    @property
    def capacity(self) -> Capacity:
        rules = self._pool.rules
        return Capacity(rules.boxes_max, rules.starting_max, rules.warm_max)

    def set_capacity(self, boxes_max: int | None = None, warm_max: int | None = None) -> Capacity:
        """Change bounds; None leaves one as it is."""
        now = self.capacity
        boxes_max = now.boxes_max if boxes_max is None else boxes_max
        warm_max = now.warm_max if warm_max is None else warm_max
        checks.capacity("boxes_max", boxes_max, 1, _BOXES_MAX)
        checks.capacity("warm_max", warm_max, 0, _BOXES_MAX)
        self._orders.feed(events.Resized(boxes_max, warm_max))
        return self.capacity

    def status(self) -> HostStatus:
        """What the host has and does."""
        layers = self._orders.templates.layers
        return HostStatus(
            self.capacity,
            Counter(self._pool.states.values()),
            self._pool.waiting,
            layers.count,
            layers.size,
            self._orders.counts,
            hostload.read(),
        )

    @counted
    async def claim(self, run: str, owner_epoch: int) -> list[Living]:
        """A router owns the run: older epochs are refused from now on. The run's living boxes."""
        self._hear(run, owner_epoch, events.Claimed(run, owner_epoch))
        return [
            Living(name, key, self._orders.boxes[name].ledger.newest)
            for name, key in self._pool.living(run).items()
        ]

    @counted
    async def acquire(
        self,
        key: EpisodeKey,
        name: str,
        digest: str,
        archive: bytes,
        asked: Limits,
        wait_s: float,
        *,
        fresh: bool = False,
        waited_s: float = 0.0,
    ) -> Acquired:
        """A box prepared for the task; the same call again gives the same box while unused.

        fresh: a box of this attempt that was used is ended first. Without it that is Refused.
        waited_s: it stands before those that have waited for less.
        """
        checks.waited(waited_s)
        self._hear(key.run, key.owner_epoch, events.Spoke(key))
        deadline = monotonic() + wait_s
        try:
            task, files = self._known.task(name, digest, archive)
            task_limits = limits.of_task(task.memory_bytes, task.disk_bytes, task.cpus)
            granted = limits.resolve(asked, task_limits, self._most, limits_cpu=self._limits_cpu)
            setup = self._setup(task, files)
        except MusterError:
            self._orders.counts.failures["task"] += 1
            raise
        wanted = (task.digest, granted)
        await self._clear(key, fresh, wanted)
        ask = self._orders.attempts.get(events.identity(key))
        if ask is None:
            ledger = Ledger(steps_max=self._config.steps_max, kept_max=self._config.answers_kept)
            ask = self._orders.expect(key, UsedBox(task, files, granted, setup, ledger))
            self._orders.enqueue(ask, deadline, monotonic() - waited_s)
        elif (ask.box.task.digest, ask.box.limits) != wanted:
            raise checks.another_box(key)
        self._orders.feed(events.Spoke(key, ask.name))
        got = await self._granted(key, ask)
        await failpoints.at("sandbox.start.after")
        return got

    def _setup(self, task: Task, files: dict[str, TaskFile]) -> Setup:
        """An image builder resolves what FROM names itself."""
        builds = self._backend.builds
        base = task.base if builds else self._bases.base_for(task.base)
        return content.setup(task, files, base, builds=builds)

    @counted
    async def fork(
        self, key: EpisodeKey, name: str, into: EpisodeKey, wait_s: float, *, after: int | None
    ) -> Acquired:
        """A second box, of the attempt `into`, from what the files of this one are now.

        The same call again gives the same box while the first has not gone on, nor the second.
        """
        box = self._find(key, name)
        into = replace(into, owner_epoch=key.owner_epoch)
        checks.fork(key, into)
        box.ledger.check(after, name)
        await self._clear(into, fresh=False)
        ask = self._orders.attempts.get(events.identity(into))
        if ask is None:
            self._idle(key, name)
            ask = self._fork(box, name, into, monotonic() + wait_s)
        elif (ask.box.forked_from, ask.box.forked_at) != (name, box.ledger.newest):
            raise checks.in_use(into)
        self._orders.feed(events.Spoke(into, ask.name))
        return await self._granted(into, ask)

    def _fork(self, box: UsedBox, name: str, into: EpisodeKey, deadline: float) -> Ask:
        if box.ledger.closed:
            raise checks.busy(f"it cannot be forked: {box.ledger.closed}", name)
        newest = box.ledger.newest
        ledger = Ledger(self._config.steps_max, self._config.answers_kept, newest)
        twin = UsedBox(box.task, box.files, box.limits, box.setup, ledger)
        twin.forked_from, twin.forked_at = name, newest
        ask = self._orders.expect(into, twin)
        self._orders.fork(ask, name, deadline)
        return ask

    async def _granted(self, key: EpisodeKey, ask: Ask) -> Acquired:
        ask.callers += 1
        try:
            return await self._orders.waiting.for_(key, ask.answer)
        finally:
            ask.callers -= 1
            if not ask.callers and not ask.answer.done():
                self._orders.abandon(key, ask)

    async def _clear(
        self, key: EpisodeKey, fresh: bool, wanted: tuple[str, Limits] | None = None
    ) -> None:
        """Wait for the end of a box of this attempt that can be used no more.

        wanted: digest of the task, and limits. An unused box of others is ended for a fresh one.
        """
        attempt = events.identity(key)
        while (ask := self._orders.attempts.get(attempt)) and ask.box.acquired:
            gone = self._pool.refusal(key, ask.name) is not None
            other = wanted is not None and (ask.box.task.digest, ask.box.limits) != wanted
            if not gone and not ask.box.touched and not (fresh and other):
                return
            if not gone and not fresh:
                raise checks.in_use(key)
            self._orders.feed(events.Released(ask.name))
            await self._wait(key, ask.name, ask.box.ended)
            self._hear(key.run, key.owner_epoch, events.Spoke(key))

    @counted
    async def execute(
        self,
        key: EpisodeKey,
        name: str,
        turn: int,
        command: str,
        timeout_s: float,
        *,
        after: int | None = None,
    ) -> tuple[StepRecord, bool]:
        """Run a step once; True with a record that is kept from an earlier call.

        after: the newest turn that ran in this box by the caller's records (Ledger.check).
        """
        await failpoints.at("sandbox.exec.before")
        box = self._find(key, name)
        checks.step(self._config, command, timeout_s)
        decision = box.ledger.decide(turn, command, after, name)
        if decision is Decision.REPEAT:
            return box.ledger.kept(turn), True
        if decision is Decision.RUN:
            if box.copying:
                raise checks.busy(box.copying, name)
            box.ledger.begin(turn, command)
            run = partial(self._backend.run, name, command, timeout_s, turn)
            stepping = work.step(self._orders, name, box, run)
            box.step = self._orders.work(name, stepping, f"step-{name}")
        assert box.step is not None
        record = known(await self._wait(key, name, box.step))
        await failpoints.at("sandbox.exec.after")
        return record, decision is Decision.WAIT

    @counted
    async def verify(self, key: EpisodeKey, name: str, *, after: int | None = None) -> Verified:
        """End the agent, seal its files, judge them; again: once more over the same files.

        A verdict that no caller has got is kept and told to the next one instead, as is one beside
        the agent's living processes, which have ended since.
        """
        await failpoints.at("sandbox.verify.before")
        box = self._find(key, name)
        box.ledger.check(after, name)
        over = box.verification is None or box.verification.done()
        if box.untold is None and box.final is None and over:
            self._idle(key, name)
            box.ledger.closed = "its files are sealed for verification"
            judging = work.judge(self._orders, self._verifying, name, box)
            box.verification = self._orders.work(name, judging, f"verify-{name}")
        assert box.verification is not None
        done = known(await self._wait(key, name, box.verification))
        await failpoints.at("sandbox.verify.after")
        box.untold = None
        return done

    @counted
    async def release(self, key: EpisodeKey, name: str) -> bool:
        """End a box; False when it is not there (any more)."""
        await failpoints.at("sandbox.release.before")
        try:
            box = self._find(key, name)
        except NotFound:
            return False
        self._orders.feed(events.Released(name))
        await self._wait(key, name, box.ended)
        self._orders.counts.released += 1
        await failpoints.at("sandbox.release.after")
        return True

    @counted
    async def copy_in(
        self, key: EpisodeKey, name: str, folder: str, archive: bytes
    ) -> tuple[int, int]:
        """Write the entries of a tar below a folder; how many files, and bytes."""
        box = self._unsealed(key, name, "nothing can be copied into it")
        checks.folder(folder, "folder")
        files = archives.read(archive, self._config.copy_bytes_max)
        box.copying = "files are being copied into it"
        writing = work.copy_in(self._orders, name, box, folder, files)
        known(await self._wait(key, name, self._orders.work(name, writing, f"copy-in-{name}")))
        return len(files), sum(len(file.data) for file in files)

    @counted
    async def copy_out(self, key: EpisodeKey, name: str, path: str) -> bytes:
        """A file or folder as a tar."""
        box = self._unsealed(key, name, "nothing can be copied out of it")
        checks.folder(path, "path")
        box.copying = "files are being copied out of it"
        reading = work.copy_out(self._orders, name, box, path)
        return known(await self._wait(key, name, self._orders.work(name, reading, f"copy-{name}")))

    def _unsealed(self, key: EpisodeKey, name: str, problem: str) -> UsedBox:
        box = self._idle(key, name)
        if box.ledger.closed:
            raise checks.busy(f"{problem}: {box.ledger.closed}", name)
        return box

    def _hear(self, run: str, owner_epoch: int, event: events.Event) -> None:
        """A call arrived: the pool hears of it. Raises Fenced for one of a former owner."""
        if self._orders.stopped:
            raise stops()
        self._orders.feed(event)
        fence = self._pool.fence(run, owner_epoch)
        if fence is not None:
            raise fence

    def _find(self, key: EpisodeKey, name: str) -> UsedBox:
        self._hear(key.run, key.owner_epoch, events.Spoke(key, name))
        refusal = self._pool.refusal(key, name)
        if refusal is not None:
            raise refusal
        box = self._orders.boxes[name]
        box.touched = True
        if box.noted_epoch < key.owner_epoch:
            noting.renote(self._orders, key, name, box)
        return box

    def _idle(self, key: EpisodeKey, name: str) -> UsedBox:
        """A box in which nothing runs, for what cannot be done beside it."""
        box = self._find(key, name)
        if box.step and not box.step.done():
            raise checks.busy("a step of this box is running", name)
        if box.copying:
            raise checks.busy(box.copying, name)
        return box

    async def _wait(self, key: EpisodeKey, name: str, running: asyncio.Future[T]) -> T:
        try:
            return await self._orders.waiting.for_(key, running)
        except NotFound:
            raise stops() if self._orders.stopped else lost(work.ENDED, name) from None
