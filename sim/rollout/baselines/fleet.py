"""The engines of a baseline on the event heap.

Owns: waking each engine when something of it ends; requests in flight and sessions per replica.
Promise: an answer is told at the time the model gives it. Does not cover: the choice of a replica.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sim.rollout.chain import Chain
from sim.rollout.engine import Done, EngineModel
from sim.rollout.figures import Fleet
from sim.rollout.heap import Alarm, Heap


class Engines:
    """`in_flight` and `sessions` by replica."""

    def __init__(self, heap: Heap, models: list[EngineModel], answered: Callable[[Done], None]):
        self.heap, self.models = heap, models
        self.in_flight = [0] * len(models)
        self.sessions = [0] * len(models)
        self._answered = answered
        self._alarms = [Alarm(heap, partial(self._ring, r)) for r in range(len(models))]

    def submit(self, replica: int, id: str, chain: Chain, sampled: int) -> None:
        """Ask a replica for a turn."""
        self.in_flight[replica] += 1
        self.models[replica].submit(id, chain, sampled, self.heap.now)
        self._arm(replica)

    def abort(self, replica: int, id: str) -> None:
        """Take a request back."""
        if self.models[replica].abort(id, self.heap.now):
            self.in_flight[replica] -= 1
        self._arm(replica)

    def seat(self, old: int, new: int) -> None:
        """A session moves; -1: nowhere."""
        if old >= 0:
            self.sessions[old] -= 1
        if new >= 0:
            self.sessions[new] += 1

    def least_loaded(self) -> int:
        """Fewest in flight, then fewest sessions, then the lowest number."""
        flight, sessions = self.in_flight, self.sessions
        return min(range(len(flight)), key=lambda r: (flight[r], sessions[r]))

    def figures(self) -> Fleet:
        """What the engines did so far."""
        return Fleet(
            at=self.heap.now,
            busy_s=tuple(model.busy_s for model in self.models),
            sampled_tokens=sum(model.sampled_tokens for model in self.models),
            prefilled_tokens=sum(model.prefilled_tokens for model in self.models),
        )

    def _arm(self, replica: int) -> None:
        self._alarms[replica].set(self.models[replica].next_at())

    def _ring(self, replica: int) -> None:
        for done in self.models[replica].advance(self.heap.now):
            self.in_flight[replica] -= 1
            self._answered(done)
        self._arm(replica)
