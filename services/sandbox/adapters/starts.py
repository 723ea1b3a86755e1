"""Makes boxes for callers: set-ups, starts, boxes that stand ready, hand-overs, forks.

Owns: nothing; the records are those of orders.py. Promise: whatever a backend raises for one box is
told to those who wait for it, logged and counted, and the pool hears how it ended: no box can end
the host. Does not cover: which box is made when (pool.py), snapshots (templates.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster import failpoints, telemetry
from muster.clock import monotonic
from muster.errors import Exhausted, InvalidInput, MusterError, Unavailable
from muster.types import Limits
from services.sandbox import checks, events
from services.sandbox.adapters import noting
from services.sandbox.adapters.callers import Acquired, Ask, Made
from services.sandbox.box import BoxFailure, Source
from services.sandbox.content import Setup

if TYPE_CHECKING:
    from services.sandbox.adapters.orders import Orders

_log = telemetry.logger("muster.sandbox")


class Starts:
    """Of one host."""

    def __init__(self, orders: Orders):
        self._orders = orders
        self._backend, self._templates = orders.backend, orders.templates
        self._counts = orders.counts

    async def set_up(self, name: str, setup: Setup, most: Limits) -> None:
        """Make the snapshot of a set-up in a box of that name."""
        began = monotonic()
        try:
            with telemetry.span("box.set_up", box=name, content=setup.content):
                await self._templates.make(name, setup, most)
        except Exception as failure:  # noqa: BLE001 - one box must not end the host
            log("the set-up in box %s failed", name, failure)
            if not isinstance(failure, InvalidInput | Exhausted):
                self._counts.failures["set_up"] += 1
            await self._orders.end_backend(name)
            self._orders.set_up_failed(name, told(failure))
            return
        self._counts.took("set_up", monotonic() - began)
        self._orders.feed(events.Built(name))

    async def warm(
        self, name: str, granted: Limits, setup: Setup | None, source: Source | None
    ) -> None:
        """A box that nobody has asked for."""
        began = monotonic()
        try:
            if setup is None:
                raise BoxFailure("how it is made is not known any more")
            await self._begin(name, granted, setup, source)
        except Exception as failure:  # noqa: BLE001 - one box must not end the host
            log("warm box %s did not start", name, failure)
            await self._failed(name, setup)
            return
        self._orders.feed(events.Started(name, monotonic() - began))

    async def _begin(self, name: str, granted: Limits, setup: Setup, source: Source | None) -> None:
        """A box with what a set-up leaves, from its snapshot or the bare base."""
        if source is None:
            raise BoxFailure("the snapshot of its set-up is gone")
        await self._backend.start(name, granted, source)
        if setup.snapshot:
            await self._backend.set_session(name, setup.session.cwd, setup.session.env)
            self._templates.doubt(setup, failed=False)
        else:
            await self._templates.prepare(name, setup)

    async def start(self, ask: Ask, name: str, source: Source | None) -> None:
        """A box for its caller."""
        box, began = ask.box, monotonic()
        try:
            with telemetry.span("box.start", box=name, task=box.task.name):
                await failpoints.at("sandbox.start.before")
                if ask.layer is None or source is None:
                    await self._begin(name, box.limits, box.setup, source)
                else:
                    told_by = ask.layer.told
                    await self._backend.start(name, box.limits, source)
                    await self._backend.set_session(name, told_by.cwd, told_by.env)
        except Exception as failure:  # noqa: BLE001 - one box must not end the host
            log("box %s did not start", name, failure)
            self._orders.forget(ask)
            await self._failed(name, box.setup if ask.layer is None else None)
            ask.settle(told(failure))
            return
        made, took_s = Made.COLD, monotonic() - began
        if ask.set_up_since >= 0:
            took_s = monotonic() - ask.set_up_since
        elif box.setup.snapshot or ask.layer:
            made = Made.FORK
        await noting.note(self._orders, ask.key, name, box, made, took_s)
        self._orders.boxes[name] = box
        self._acquired(ask, made, took_s)
        self._orders.feed(events.Started(name, took_s))
        _settle(ask)

    async def _failed(self, name: str, setup: Setup | None) -> None:
        self._counts.failures["start"] += 1
        await self._orders.end_backend(name)
        self._orders.leave(name)
        if setup is not None and setup.snapshot and self._templates.doubt(setup, failed=True):
            self._orders.feed(events.Dropped(setup.content))
        self._orders.feed(events.StartFailed(name))

    async def hand_over(self, ask: Ask, name: str) -> None:
        """A box that stood ready, to its caller, if it is alive."""
        try:
            if not await self._backend.alive(name):
                raise BoxFailure("its first process does not answer")
        except Exception as failure:  # noqa: BLE001 - one box must not end the host
            log("warm box %s is dead", name, failure)
            self._counts.warm_dead += 1
            self._orders.wait_again(ask)
            self._orders.feed(events.FoundDead(name))
            return
        await noting.note(self._orders, ask.key, name, ask.box, Made.WARM, 0.0)
        self._orders.boxes[name] = ask.box
        self._acquired(ask, Made.WARM, 0.0)
        self._orders.feed(events.Handed(name))
        _settle(ask)

    def _acquired(self, ask: Ask, made: Made, took_s: float) -> None:
        waited_s = max(0.0, monotonic() - ask.box.since - took_s)
        ask.box.acquired = Acquired(ask.name, took_s, ask.box.task.workdir, made, waited_s)
        self._counts.acquired[made.value] += 1
        self._counts.took("wait", waited_s)
        self._counts.took("fork" if made is Made.FORK else "start", took_s)

    async def fork(self, ask: Ask, source: str, deadline: float) -> None:
        """Snapshot a box for an attempt, which then waits for its own."""
        box = self._orders.boxes[source]
        try:
            with telemetry.span("box.fork", box=source):
                ask.layer = await self._templates.fork(source, ask.pin)
        except Exception as failure:  # noqa: BLE001 - one box must not end the host
            log("box %s could not be forked", source, failure)
            self._orders.forget(ask)
            ask.settle(told(failure))
            return
        finally:
            box.copying = ""
        if self._orders.attempts.get(ask.attempt) is not ask:  # its callers left
            self._orders.leave(ask.pin)
        elif self._orders.pool.fence(ask.key.run, ask.key.owner_epoch):
            self._orders.forget(ask)
            ask.settle(Unavailable("the owner of the run changed", way_out="ask again"))
        else:
            self._orders.enqueue(ask, deadline, monotonic())


def told(failure: Exception) -> MusterError:
    """What a caller hears of the start that failed."""
    return failure if isinstance(failure, MusterError) else checks.start_trouble(str(failure))


def log(problem: str, name: str, failure: Exception) -> None:
    """problem: has a place for the name. What no backend should raise is logged with its origin."""
    expected = isinstance(failure, BoxFailure | MusterError)
    _log.warning(f"{problem}: %r", name, failure, exc_info=None if expected else failure)


def _settle(ask: Ask) -> None:
    if not ask.answer.done() and ask.box.acquired is not None:
        ask.answer.set_result(ask.box.acquired)
