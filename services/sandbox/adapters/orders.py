"""Carries out what the pool orders: set-ups, starts, hand-overs, forks, ends.

Owns: the pool, every box in use and asked for, every task in flight. Promise: a caller that goes
away, or is fenced, changes nothing for others; what fails is told to those who wait for it and
never ends the host. Closing ends all boxes with the backend. Does not cover: what callers may ask
(driver.py), steps and verdicts (adapters/work.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

from muster import failpoints, telemetry
from muster.clock import monotonic
from muster.errors import MusterError, Unavailable
from muster.types import EpisodeKey, Limits
from services.sandbox import checks, events, limits
from services.sandbox.adapters.callers import Acquired, Ask, Made, UsedBox, Waiting, stops
from services.sandbox.adapters.templates import Templates
from services.sandbox.box import Backend, BoxFailure, Source
from services.sandbox.config import SandboxConfig
from services.sandbox.content import Setup
from services.sandbox.counts import Counts
from services.sandbox.layers import Layer
from services.sandbox.notes import Note, packed, write
from services.sandbox.pool import Pool, PoolRules
from services.sandbox.warm import Kind

_log = telemetry.logger("muster.sandbox")
_TICK_S = 0.25
_ENDS_MAX = 3  # tries to end one box; each may take as long as the backend is patient
T = TypeVar("T")


class Orders:
    """The acting half of a host; `tasks` is entered and left by the driver."""

    def __init__(self, backend: Backend, config: SandboxConfig):
        self.backend, self.config = backend, config
        self.counts, self.waiting = Counts(), Waiting()
        prefix = secrets.token_hex(3)
        self.templates = Templates(backend, config, self.counts, prefix)
        rules = PoolRules(
            boxes_max=config.boxes_max,
            starting_max=config.starting_max,
            waiting_max=config.waiting_max,
            idle_s=config.idle_s,
            adopt_s=config.adopt_s,
            warm_max=config.warm_max,
            warm_idle_s=config.warm_idle_s,
            building_max=config.building_max,
        )
        self.pool = Pool(rules, prefix=f"b{prefix}")
        self.boxes: dict[str, UsedBox] = {}
        self.attempts: dict[EpisodeKey, Ask] = {}  # by the identity of their boxes
        self.tasks = asyncio.TaskGroup()
        self.stopped = False
        self._most = limits.most(config)
        self._asks: dict[int, Ask] = {}  # by ticket, until their start begins
        self._failures: dict[str, MusterError] = {}  # by box, while a failed set-up is told
        self._running: set[asyncio.Task[Any]] = set()
        self._tickets = 0
        self._depth = 0  # of orders that are being begun

    def stop(self) -> None:
        """Answer every caller now, with Unavailable; waits for nothing."""
        self.stopped = True
        for ask in self.attempts.values():
            ask.settle(stops())
        for task in self._running:
            task.cancel()  # the backend ends with us, and all boxes with it

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = self.tasks.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def tick(self) -> None:
        """Tell the pool of time until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.feed(events.Ticked())

    # Callers -------------------------------------------------------------------------------

    def expect(self, key: EpisodeKey, box: UsedBox) -> Ask:
        """Note that an attempt is asking for a box; `enqueue` lets it wait for one."""
        self._tickets += 1
        ask = Ask(key, box, self._tickets, monotonic())
        self.attempts[ask.attempt] = self._asks[ask.ticket] = ask
        return ask

    def enqueue(self, ask: Ask, deadline: float) -> None:
        setup, kind = ask.box.setup, None
        if ask.layer is None:
            self.templates.remember(setup)
            kind = Kind(setup.content, ask.box.limits, setup.snapshot)
        self.feed(events.Asked(ask.ticket, ask.key, deadline, kind))

    def abandon(self, key: EpisodeKey, ask: Ask) -> None:
        """Every caller left before the box was there: nobody would ever use or release it.

        Unless they were fenced: then the start goes on, for the new owner.
        """
        if ask.name and self.pool.fence(key.run, key.owner_epoch):
            return
        self.forget(ask)
        self.feed(events.Released(ask.name) if ask.name else events.GaveUp(ask.ticket))

    def forget(self, ask: Ask) -> None:
        """The attempt has this box no more."""
        self._asks.pop(ask.ticket, None)
        if self.attempts.get(ask.attempt) is ask:
            del self.attempts[ask.attempt]
        self._leave(ask.pin)

    def fork(self, ask: Ask, source: str, deadline: float) -> None:
        """Snapshot a box for an attempt that waits, then let it wait for its own."""
        self.boxes[source].being_copied = True
        self.spawn(self._fork(ask, source, deadline), f"fork-{source}")

    # What the pool orders ------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """Tell the pool, and begin what it orders."""
        self._depth += 1
        for command in self.pool.handle(event, monotonic()):
            match command:
                case events.TellFormer():
                    self.waiting.fence(self.pool.fence)
                case events.EndBox(box, why):
                    self.spawn(self._end(box, why), f"end-{box}")
                case events.StartWarm(box, kind):
                    self._warm(box, kind)
                case events.RunSetup(box, kind):
                    self._set_up(box, kind)
                case _:
                    self._for_caller(command)
        self._depth -= 1
        self._collect()

    def _for_caller(
        self,
        command: events.StartBox | events.HandOver | events.TellFailure | events.RefuseTicket,
    ) -> None:
        ask = self._asks.pop(command.ticket)
        match command:
            case events.StartBox(_, box):
                ask.name = box
                source = self._pinned(box, ask)
                self.spawn(self._start(ask, box, source), f"start-{box}")
            case events.HandOver(_, box):
                ask.name = box
                self.spawn(self._hand_over(ask, box), f"hand-over-{box}")
            case events.TellFailure(_, box):
                self.forget(ask)
                ask.settle(self._failures[box])
            case events.RefuseTicket():
                self.forget(ask)
                ask.settle(checks.refused(command))

    def _pinned(self, name: str, ask: Ask) -> Source | None:
        """What a caller's box starts from; it is kept for the box from now on."""
        if ask.layer is None:
            return self.templates.pin(name, ask.box.setup)
        self.templates.layers.use(name, ask.layer.name, monotonic())
        self._leave(ask.pin)
        return Source(ask.box.setup.base, ask.layer.name)

    def _set_up(self, name: str, kind: Kind) -> None:
        """The caller that waits longest for it is the one that it is run for."""
        asks = [ask for ask in self._asks.values() if ask.box.setup.content == kind.content]
        for ask in asks[:1]:
            ask.set_up_since = monotonic()
        self.spawn(self._run_setup(name, asks[0].box.setup), f"set-up-{name}")

    async def _run_setup(self, name: str, setup: Setup) -> None:
        began = monotonic()
        try:
            with telemetry.span("box.set_up", box=name, content=setup.content):
                await self.templates.make(name, setup, self._most)
        except (BoxFailure, MusterError) as failure:
            _log.warning("a set-up failed in box %s: %s", name, failure)
            if not isinstance(failure, MusterError) or isinstance(failure, Unavailable):
                self.counts.failures["set_up"] += 1
            await self.end_backend(name)
            self._failures[name] = _told(failure)
            self.feed(events.BuildFailed(name))
            del self._failures[name]
            return
        self.counts.took("set_up", monotonic() - began)
        self.feed(events.Built(name))

    def _warm(self, name: str, kind: Kind) -> None:
        setup = self.templates.remembered(kind.content)
        source = None if setup is None else self.templates.pin(name, setup)
        self.spawn(self._start_warm(name, kind.limits, setup, source), f"warm-{name}")

    async def _start_warm(
        self, name: str, granted: Limits, setup: Setup | None, source: Source | None
    ) -> None:
        began = monotonic()
        try:
            if setup is None:
                raise BoxFailure("how it is made is not known any more")
            await self._begin(name, granted, setup, source)
        except BoxFailure as failure:
            _log.warning("warm box %s did not start: %s", name, failure)
            await self._start_failed(name, setup)
            return
        self.feed(events.Started(name, monotonic() - began))

    async def _begin(self, name: str, granted: Limits, setup: Setup, source: Source | None) -> None:
        """A box with what a set-up leaves, from its snapshot or the bare base."""
        if source is None:
            raise BoxFailure("the snapshot of its set-up is gone")
        await self.backend.start(name, granted, source)
        if setup.snapshot:
            await self.backend.set_session(name, setup.session.cwd, setup.session.env)
            self.templates.doubt(setup, failed=False)
        else:
            await self.templates.prepare(name, setup)

    async def _start(self, ask: Ask, name: str, source: Source | None) -> None:
        box, began = ask.box, monotonic()
        try:
            with telemetry.span("box.start", box=name, task=box.task.name):
                await failpoints.at("sandbox.start.before")
                if ask.layer is None or source is None:
                    await self._begin(name, box.limits, box.setup, source)
                else:
                    told = ask.layer.told
                    await self.backend.start(name, box.limits, source)
                    await self.backend.set_session(name, told.cwd, told.env)
                took_s = monotonic() - began
                await self.note(ask.key, name, box)
        except (BoxFailure, MusterError) as failure:
            _log.warning("box %s did not start: %s", name, failure)
            self.forget(ask)
            await self._start_failed(name, box.setup if ask.layer is None else None)
            ask.settle(_told(failure))
            return
        self.boxes[name] = box
        made = Made.FORK if box.setup.snapshot or ask.layer else Made.COLD
        if ask.set_up_since >= 0:
            made, took_s = Made.COLD, monotonic() - ask.set_up_since
        self._acquired(ask, made, took_s)
        self.feed(events.Started(name, took_s))
        self._settle(ask)

    async def _start_failed(self, name: str, setup: Setup | None) -> None:
        self.counts.failures["start"] += 1
        await self.end_backend(name)
        self._leave(name)
        if setup is not None and setup.snapshot and self.templates.doubt(setup, failed=True):
            self.feed(events.Dropped(setup.content))
        self.feed(events.StartFailed(name))

    async def _hand_over(self, ask: Ask, name: str) -> None:
        try:
            if not await self.backend.alive(name):
                raise BoxFailure("its first process does not answer")
            await self.note(ask.key, name, ask.box)
        except BoxFailure as failure:
            _log.warning("warm box %s is dead: %s", name, failure)
            self.counts.warm_dead += 1
            ask.name = ""
            if self.attempts.get(ask.attempt) is ask:
                self._asks[ask.ticket] = ask
            self.feed(events.FoundDead(name))
            return
        self.boxes[name] = ask.box
        self._acquired(ask, Made.WARM, 0.0)
        self.feed(events.Handed(name))
        self._settle(ask)

    def _acquired(self, ask: Ask, made: Made, took_s: float) -> None:
        waited_s = max(0.0, monotonic() - ask.since - took_s)
        ask.box.acquired = Acquired(ask.name, took_s, ask.box.task.workdir, made, waited_s)
        self.counts.acquired[made.value] += 1
        self.counts.took("wait", waited_s)
        self.counts.took("fork" if made is Made.FORK else "start", took_s)

    def _settle(self, ask: Ask) -> None:
        if not ask.answer.done() and ask.box.acquired is not None:
            ask.answer.set_result(ask.box.acquired)

    async def _fork(self, ask: Ask, source: str, deadline: float) -> None:
        box = self.boxes[source]
        try:
            with telemetry.span("box.fork", box=source):
                ask.layer = await self.templates.fork(source, ask.pin)
        except (BoxFailure, MusterError) as failure:
            _log.warning("box %s could not be forked: %s", source, failure)
            self.forget(ask)
            ask.settle(_told(failure))
            return
        finally:
            box.being_copied = False
        if self.attempts.get(ask.attempt) is not ask:  # its callers left
            self._leave(ask.pin)
        elif self.pool.fence(ask.key.run, ask.key.owner_epoch):
            self.forget(ask)
            ask.settle(Unavailable("the owner of the run changed", way_out="ask again"))
        else:
            self.enqueue(ask, deadline)

    async def note(self, key: EpisodeKey, name: str, box: UsedBox) -> None:
        """Leave with a box what a successor of this service has to know of it."""
        layers = self.templates.layers
        chain: tuple[Layer, ...] = layers.chain(layers.used_by(name))
        task, archive = box.task, packed(box.task.archive)
        base, newest = box.setup.base, box.forked_at
        found = Note(key, task.name, task.digest, archive, box.limits, base, chain, newest)
        box.noted_epoch = key.owner_epoch
        await self.backend.note(name, write(found))

    def renote(self, key: EpisodeKey, name: str, box: UsedBox) -> None:
        """Another owner goes on in a box: its note follows, in its own time. Until then a
        successor takes it over under the former owner, whom this one then replaces there too."""
        box.noted_epoch = key.owner_epoch
        self.spawn(self._renote(key, name, box), f"note-{name}")

    async def _renote(self, key: EpisodeKey, name: str, box: UsedBox) -> None:
        try:
            await self.note(key, name, box)
        except BoxFailure as failure:
            self.counts.failures["note"] += 1
            _log.warning("the note of box %s is old: %s", name, failure)

    async def _end(self, name: str, why: str) -> None:
        _log.debug("box %s ends: %s", name, why)
        began = monotonic()
        box = self.boxes.pop(name, None)
        if box and box.verification and not box.verification.done():
            box.verification.cancel()  # it ends the verifier's box on its way out
            await asyncio.wait([box.verification])
        try:
            await self.end_backend(name)
        finally:
            if box:
                box.ended.set()
        self.counts.took("end", monotonic() - began)
        self._leave(name)
        self.feed(events.Ended(name))
        for ask in [ask for ask in self.attempts.values() if ask.box is box]:
            self.forget(ask)

    async def end_backend(self, name: str) -> None:
        """End a box, trying again; nothing for one that is not there."""
        for _ in range(_ENDS_MAX):
            try:
                await self.backend.end(name)
                return
            except BoxFailure as failure:
                # After the last, the keeper's end or the sweep of the next start removes it.
                self.counts.failures["end"] += 1
                _log.error("box %s could not be ended: %s", name, failure)

    def _leave(self, user: str) -> None:
        """A box, or a caller, uses its snapshot no more."""
        self.templates.layers.leave(user, monotonic())
        self._collect()

    def _collect(self) -> None:
        """Drop the snapshots that nothing needs; not while orders that may need one are begun."""
        if self._depth or self.stopped:
            return
        gone = self.templates.layers.collect()
        if not gone:
            return
        self.spawn(self.templates.drop(gone), f"drop-{gone[0].name}")
        for layer in gone:
            if layer.content and not self.templates.has(layer.content):
                self.feed(events.Dropped(layer.content))


def _told(failure: BoxFailure | MusterError) -> MusterError:
    return checks.start_trouble(str(failure)) if isinstance(failure, BoxFailure) else failure
