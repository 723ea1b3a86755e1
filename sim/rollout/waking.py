"""The engines of a fleet on the event heap, by the names that the router knows.

Owns: when each engine is looked at. Promise: an answer is told at the time the model gives it, in
the order of the model. Does not cover: the engine (engine.py), who is asked (router_actor.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sim.rollout.engine import Done, EngineModel
from sim.rollout.heap import Heap


class Engines:
    """The replicas, woken when something of theirs is due."""

    def __init__(self, heap: Heap, models: dict[str, EngineModel], done: Callable[[Done], None]):
        self.models = models
        self.numbers = {name: number for number, name in enumerate(models)}
        self._heap, self._done = heap, done
        self._wakes: dict[str, float] = dict.fromkeys(models, float("inf"))

    def stirred(self, replica: str) -> None:
        """Something was submitted or aborted: what is due next may be due sooner now."""
        at = self.models[replica].next_at()
        if at is not None and at < self._wakes[replica]:
            self._wakes[replica] = at
            self._heap.at(at, partial(self._wake, replica))

    def _wake(self, replica: str) -> None:
        if self._heap.now < self._wakes[replica]:
            return  # a sooner one was asked for, and came
        self._wakes[replica] = float("inf")
        for done in self.models[replica].advance(self._heap.now):
            self._done(done)
        self.stirred(replica)
