"""A seeded event heap: the only clock and the only chance of a simulation.

Owns: time, order, randomness, the trace. Promise: the same seed gives the same trace, byte for
byte; equal times run in the order in which they were asked for; each name draws its own chances,
so a fault left out disturbs the others little. Does not cover: what happens (the processes).
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from muster.types import Value

_encoder = msgspec.json.Encoder(order="deterministic", enc_hook=str)
Do = Callable[[], None]
WALL_START_S = 1_750_000_000.0  # of every simulated wall clock


class Line(Value, frozen=True):
    """One handled event, for people."""

    at: float
    who: str
    text: str


class World:
    """`now` in seconds from the start of the simulation. `tell`, when set, hears every line."""

    def __init__(self, seed: int):
        self.seed, self.now, self.steps = seed, 0.0, 0
        self.reach: Counter[str] = Counter()  # fault kind x state → how often
        self.fired: Counter[str] = Counter()  # faults by kind
        self.tell: Callable[[Line], None] | None = None
        self.states: Callable[[], Iterable[str]] = tuple  # of all machines, now
        self.has: Callable[[str], bool] = lambda state: False  # some machine is in it
        self._rngs: dict[str, random.Random] = {}
        self._heap: list[tuple[float, int, Do]] = []
        self._asked = 0
        self._trace = hashlib.sha256()

    def rng(self, name: str) -> random.Random:
        """The chances of one name."""
        found = self._rngs.get(name)
        if found is None:
            found = self._rngs[name] = random.Random(f"{self.seed}/{name}")
        return found

    def spread(self, name: str, mean_s: float) -> float:
        """An exponential time, cut at ten means."""
        return min(self.rng(name).expovariate(1.0 / mean_s), 10.0 * mean_s) if mean_s else 0.0

    def after(self, delay_s: float, do: Do) -> None:
        """Do something `delay_s` from now."""
        self._asked += 1
        heapq.heappush(self._heap, (self.now + max(delay_s, 0.0), self._asked, do))

    def record(self, who: str, event: object, commands: Sequence[object]) -> None:
        """Put one handled event into the trace."""
        self._trace.update(_encoder.encode([self.now, who, event, commands]))
        if self.tell is not None:
            self.tell(Line(self.now, who, f"{event} → {list(commands)}"))

    def struck(self, kind: str) -> None:
        """A fault of this kind has its effect now: count it, with the states that it met."""
        self.fired[kind] += 1
        for state in self.states():
            self.reach[f"{kind} | {state}"] += 1

    def note(self, who: str, text: str) -> None:
        """Put a fault, or what a process does of itself, into the trace."""
        self.record(who, text, ())

    @property
    def trace(self) -> str:
        """sha256 of all that was recorded, hexadecimal."""
        return self._trace.hexdigest()

    @property
    def pending(self) -> int:
        return len(self._heap)

    def run(self, done: Callable[[], bool], check: Do, *, until_s: float) -> bool:
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
