"""The boxes of a fleet as the baselines use them: bounded, started cold or taken from spares.

Owns: how many boxes there are, how many start at once, spares kept ready. Promise: first come,
first served; spares count as boxes; an attempt's own cold start takes the time of its plan.
Does not cover: what happens in a box, its failures (the plan says when; the arm acts on it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from sim.rollout.heap import Entry, Heap
from sim.rollout.workload import Regime

Do = Callable[[], None]

REPLAY_DIFFERS = 0.5
"""Share of rebuilt boxes in which a command that runs again prints something else: times, names of
processes, what the network said. An assumption, no source tells it; baselines rebuild none."""


class Ticket:
    """One request for a box, until it is released."""

    __slots__ = ("entry", "holds", "over", "ready", "start_s", "started")

    def __init__(self, start_s: float, started: Do, ready: Do):
        self.start_s, self.started, self.ready = start_s, started, ready
        self.holds = self.over = False
        self.entry: Entry | None = None


class Boxes:
    """`spares`: boxes kept started for whoever comes next (0: every start is cold). `freed` is
    called soon after a box became available that nobody waited for."""

    def __init__(self, heap: Heap, regime: Regime, *, spares: int = 0, freed: Do | None = None):
        self.heap, self.regime, self._freed = heap, regime, freed
        self.free = regime.boxes  # neither held nor starting nor spare
        self.spare = 0
        self._spares = min(spares, regime.boxes)
        self._warming = 0
        self._slots = regime.cold_at_once
        self._waiting: deque[Ticket] = deque()  # for a box
        self._starting: deque[Ticket | None] = deque()  # for a start slot; None: a spare
        self._rng = heap.rng("spares")
        self._refill()

    @property
    def available(self) -> int:
        """Boxes that a request would get without waiting for another's end."""
        return self.free + self.spare - len(self._waiting)

    def acquire(self, start_s: float, started: Do, ready: Do) -> Ticket:
        """`started` when a box is set aside, `ready` when it runs; never before returning."""
        ticket = Ticket(start_s, started, ready)
        self._waiting.append(ticket)
        self.heap.after(0.0, self._serve)
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Give the box back, or stop waiting for it. Twice is once."""
        if ticket.over:
            return
        ticket.over = True
        if ticket.holds:
            self.free += 1
            if ticket.entry is not None:
                self.heap.cancel(ticket.entry)
                if ticket.start_s > 0.0:  # its cold start is broken off: the slot is free
                    self._slots += 1
        else:
            self._waiting.remove(ticket)
        self._serve()

    def _serve(self) -> None:
        """Hand out what there is, then start what may start, then think of spares."""
        while self._waiting and (self.free or self.spare):
            ticket = self._waiting.popleft()
            ticket.holds = True
            if self.spare:
                self.spare -= 1
                ticket.start_s = 0.0
                ticket.entry = self.heap.after(self.regime.warm_s, partial(self._up, ticket))
            else:
                self.free -= 1
                self._starting.append(ticket)
            ticket.started()
        self._refill()
        self._start()
        if self._freed is not None and self.available > 0:
            self.heap.after(0.0, self._freed)

    def _refill(self) -> None:
        while self.spare + self._warming < self._spares and self.free > len(self._waiting):
            self.free -= 1
            self._warming += 1
            self._starting.append(None)
        self._start()

    def _start(self) -> None:
        while self._slots and self._starting:
            ticket = self._starting.popleft()
            if ticket is None:
                cold = self.regime.cold
                start_s = self._rng.lognormvariate(0.0, cold.sigma) * cold.median
                self._slots -= 1
                self.heap.after(start_s, self._spare_up)
            elif not ticket.over:
                self._slots -= 1
                ticket.entry = self.heap.after(ticket.start_s, partial(self._up, ticket))

    def _up(self, ticket: Ticket) -> None:
        ticket.entry = None
        if ticket.start_s > 0.0:
            self._slots += 1
            self._start()
        ticket.ready()

    def _spare_up(self) -> None:
        self._slots += 1
        self._warming -= 1
        self.spare += 1
        self._serve()
