"""A seeded event heap: the only clock and the only chance of a simulation.

Owns: time, order, randomness, the trace. Promise: the same seed gives the same trace, byte for
byte; equal times run in the order in which they were asked for. Does not cover: what happens
(router.py, bank.py, trainer.py).
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Sequence

import msgspec

_encoder = msgspec.json.Encoder(order="deterministic")


class World:
    """`now` in seconds from the start of the simulation."""

    def __init__(self, seed: int):
        self.seed, self.now, self.steps = seed, 0.0, 0
        self.rng = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0
        self._trace = hashlib.sha256()

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        """Do something `delay_s` from now."""
        self._asked += 1
        heapq.heappush(self._heap, (self.now + max(delay_s, 0.0), self._asked, do))

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def record(self, who: str, event: object, commands: Sequence[object]) -> None:
        """Put one handled event into the trace."""
        self._trace.update(_encoder.encode([self.now, who, event, commands]) + b"\n")

    @property
    def trace(self) -> str:
        """sha256 of all that was recorded, hexadecimal."""
        return self._trace.hexdigest()

    def run(self, done: Callable[[], bool], check: Callable[[], None], *, until_s: float) -> bool:
        """Until `done`; False when `until_s` passed first. `check` runs after every event."""
        while self._heap:
            at, _, do = heapq.heappop(self._heap)
            if at > until_s:
                return False
            self.now = at
            self.steps += 1
            do()
            check()
            if done():
                return True
        return False
