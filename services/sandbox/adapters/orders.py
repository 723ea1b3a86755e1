"""Asks the pool and has done what it orders; what is known of each box and caller.

Owns: the pool, every box in use and asked for, every task in flight. Promise: a caller that goes
away, or is fenced, changes nothing for others; what fails for one box, however, is told to those
who wait for it and never ends the host. Closing ends all boxes with the backend. Does not cover:
what callers may ask (driver.py), how a box is made and handed over (adapters/starts.py), steps and
verdicts (adapters/work.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

from muster import telemetry
from muster.clock import monotonic
from muster.errors import MusterError
from muster.types import EpisodeKey
from services.sandbox import checks, events, limits
from services.sandbox.adapters.callers import Ask, UsedBox, Waiting, stops
from services.sandbox.adapters.starts import Starts
from services.sandbox.adapters.templates import Templates
from services.sandbox.box import Backend, Source
from services.sandbox.config import SandboxConfig
from services.sandbox.counts import Counts
from services.sandbox.events import identity
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
        self._starts = Starts(self)
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
            ask.box.stop()
        for task in self._running:
            task.cancel()  # the backend ends with us, and all boxes with it

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = self.tasks.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def work(self, box: str, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """The same for what runs in a box, which is in use until then, whoever waits."""
        self.feed(events.Working(box))
        task = self.spawn(work, name)
        task.add_done_callback(lambda _: self.feed(events.Rested(box)))
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
        ask = self.attempts[identity(key)] = Ask(key, box, self._tickets)
        return ask

    def enqueue(self, ask: Ask, deadline: float, since: float) -> None:
        """Let it wait; since: as in Asked."""
        setup, kind = ask.box.setup, None
        if ask.layer is None:
            self.templates.remember(setup)
            kind = Kind(setup.content, ask.box.limits, setup.snapshot)
        self._asks[ask.ticket] = ask
        self.feed(events.Asked(ask.ticket, ask.key, deadline, kind, since))

    def abandon(self, key: EpisodeKey, ask: Ask) -> None:
        """Every caller left before the box was there: nobody would ever use or release it.

        Unless they were fenced: then the start goes on, for the new owner.
        """
        if ask.name and self.pool.fence(key.run, key.owner_epoch):
            return
        # First of all, so that nothing is begun any more for what is forgotten then.
        self.feed(events.Released(ask.name) if ask.name else events.GaveUp(ask.ticket))
        self.forget(ask)

    def forget(self, ask: Ask) -> None:
        """The attempt has this box no more."""
        self._asks.pop(ask.ticket, None)
        if self.attempts.get(ask.attempt) is ask:
            del self.attempts[ask.attempt]
        self.leave(ask.pin)

    def wait_again(self, ask: Ask) -> None:
        """The box that it was to have is dead; its place in the queue is the pool's to say."""
        ask.name = ""
        if self.attempts.get(ask.attempt) is ask:
            self._asks[ask.ticket] = ask

    def fork(self, ask: Ask, source: str, deadline: float) -> None:
        """Snapshot a box for an attempt that waits, then let it wait for its own."""
        self.boxes[source].copying = "its files are being copied for a fork"
        self.work(source, self._starts.fork(ask, source, deadline), f"fork-{source}")

    # What the pool orders ------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """Tell the pool, and begin what it orders; nothing once the host stops."""
        if self.stopped:
            return
        self._depth += 1
        try:
            for command in self.pool.handle(event, monotonic()):
                self._obey(command)
        finally:
            self._depth -= 1
        self._collect()

    def _obey(self, command: events.Command) -> None:
        match command:
            case events.TellFormer():
                self.waiting.fence(self.pool.fence)
            case events.EndBox(box, why):
                self.spawn(self._end(box, why), f"end-{box}")
            case events.StartWarm(box, kind):
                self._warm(box, kind)
            case events.RunSetup(box, _, ticket):
                ask = self._asks[ticket]
                ask.set_up_since = monotonic()
                work = self._starts.set_up(box, ask.box.setup, self._most)
                self.spawn(work, f"set-up-{box}")
            case _:
                self._for_caller(command)

    def _for_caller(
        self,
        command: events.StartBox | events.HandOver | events.TellFailure | events.RefuseTicket,
    ) -> None:
        ask = self._asks.pop(command.ticket)
        match command:
            case events.StartBox(_, box):
                ask.name = box
                source = self._pinned(box, ask)
                self.spawn(self._starts.start(ask, box, source), f"start-{box}")
            case events.HandOver(_, box):
                ask.name = box
                self.spawn(self._starts.hand_over(ask, box), f"hand-over-{box}")
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
        self.leave(ask.pin)
        return Source(ask.box.setup.base, ask.layer.name)

    def set_up_failed(self, name: str, told: MusterError) -> None:
        """Each that waits for the set-up hears of it."""
        self._failures[name] = told
        try:
            self.feed(events.BuildFailed(name))
        finally:
            del self._failures[name]

    def _warm(self, name: str, kind: Kind) -> None:
        setup = self.templates.remembered(kind.content)
        source = None if setup is None else self.templates.pin(name, setup)
        self.spawn(self._starts.warm(name, kind.limits, setup, source), f"warm-{name}")

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
                box.end()
        self.counts.took("end", monotonic() - began)
        self.leave(name)
        self.feed(events.Ended(name))
        for ask in [ask for ask in self.attempts.values() if ask.box is box]:
            self.forget(ask)

    async def end_backend(self, name: str) -> None:
        """End a box, trying again; nothing for one that is not there."""
        for _ in range(_ENDS_MAX):
            try:
                await self.backend.end(name)
                return
            except Exception as failure:  # noqa: BLE001 - one box must not end the host
                # After the last, the keeper's end or the sweep of the next start removes it.
                self.counts.failures["end"] += 1
                _log.error("box %s could not be ended: %r", name, failure)
        try:
            await self.backend.note(name, b"")  # no successor goes on in it
        except Exception as failure:  # noqa: BLE001 - as above
            _log.error("box %s keeps its note: %r", name, failure)

    def leave(self, user: str) -> None:
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
