"""The production Pool of each sandbox host, bound to the models of boxes.

Owns: what each command of a pool comes to in simulated time. Promise: who gets which box, what is
set up once for all siblings, what stands ready and what ends is the pool's own decision. Does not
cover: idle boxes (nothing here is forgotten, so nothing times out: calls within a box are not told
to the pool, which keeps its per-turn cost at zero), forks of living boxes, a whole host that dies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from services.router.events import AcquireBox
from services.sandbox import events as s
from services.sandbox.pool import Pool
from services.sandbox.warm import Kind
from sim.rollout.heap import Heap

_SPARE_S = 0.05  # of a box that stands ready for nobody yet


class Asks(Protocol):
    """Who asks for boxes: the router's shell. `cold`, `warm`: seconds of a start, and whether it
    leads to a box."""

    def cold(self, command: AcquireBox) -> tuple[float, bool]: ...

    def warm(self, command: AcquireBox) -> tuple[float, bool]: ...

    def has_box(self, command: AcquireBox, box: str, asked_at: float) -> None: ...

    def no_box(self, command: AcquireBox, detail: str) -> None: ...


class PoolActor:
    """All hosts. warm: boxes start from the snapshot of their task's set-up, which the first caller
    on a host waits for; else each starts cold."""

    def __init__(self, heap: Heap, pools: dict[str, Pool], *, warm: bool):
        self.pools = pools
        self.router: Asks | None = None
        self._heap, self._warm = heap, warm
        self._asked: dict[int, tuple[AcquireBox, float]] = {}  # by ticket, not granted yet
        self._ticket = 0
        self._execute: dict[type[Any], Callable[[str, Any], None]] = {
            s.StartBox: self._start,
            s.StartWarm: self._start_warm,
            s.HandOver: self._hand_over,
            s.RunSetup: self._set_up,
            s.TellFailure: self._failed,
            s.RefuseTicket: self._refused,
            s.EndBox: self._end,
            s.TellFormer: lambda host, command: None,
        }

    def acquire(self, command: AcquireBox) -> None:
        self._ticket += 1
        self._asked[self._ticket] = (command, self._heap.now)
        kind = Kind(command.task_digest, command.limits, self._warm)
        self._feed(command.host, s.Asked(self._ticket, command.episode, float("inf"), kind))

    def release(self, host: str, box: str) -> None:
        self._feed(host, s.Released(box))

    def _feed(self, host: str, event: s.Event) -> None:
        for command in self.pools[host].handle(event, self._heap.now):
            self._execute[type(command)](host, command)

    def _later(self, after_s: float, host: str, event: s.Event) -> None:
        self._heap.after(after_s, partial(self._feed, host, event))

    def _start(self, host: str, command: s.StartBox) -> None:
        asked = self._asked[command.ticket]
        assert self.router is not None
        starts = self.router.warm if self._warm else self.router.cold
        took_s, comes_up = starts(asked[0])
        self._heap.after(
            took_s, partial(self._started, host, command, took_s if comes_up else -1.0)
        )

    def _started(self, host: str, command: s.StartBox, took_s: float) -> None:
        if took_s < 0:
            self._feed(host, s.StartFailed(command.box))
            self._refuse(command.ticket, "the box did not start")
            return
        self._feed(host, s.Started(command.box, took_s))
        self._grant(command.ticket, command.box)

    def _start_warm(self, host: str, command: s.StartWarm) -> None:
        self._later(_SPARE_S, host, s.Started(command.box, _SPARE_S))

    def _hand_over(self, host: str, command: s.HandOver) -> None:
        self._feed(host, s.Handed(command.box))
        self._grant(command.ticket, command.box)

    def _grant(self, ticket: int, box: str) -> None:
        asked, at = self._asked.pop(ticket)
        assert self.router is not None
        self.router.has_box(asked, box, at)

    def _set_up(self, host: str, command: s.RunSetup) -> None:
        assert self.router is not None
        took_s, comes_up = self.router.cold(self._asked[command.ticket][0])
        over = s.Built(command.box) if comes_up else s.BuildFailed(command.box)
        self._later(took_s, host, over)

    def _failed(self, host: str, command: s.TellFailure) -> None:
        self._refuse(command.ticket, "its set-up failed")

    def _refused(self, host: str, command: s.RefuseTicket) -> None:
        self._refuse(command.ticket, command.problem)

    def _refuse(self, ticket: int, detail: str) -> None:
        asked, _ = self._asked.pop(ticket)
        assert self.router is not None
        self.router.no_box(asked, detail)

    def _end(self, host: str, command: s.EndBox) -> None:
        self._feed(host, s.Ended(command.box))
