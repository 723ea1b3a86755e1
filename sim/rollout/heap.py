"""A light event heap for simulations of performance.

Owns: time, the order of what happens, the chances of each name, an optional trace. Promise: equal
times run in the order in which they were asked for, and equal seeds give equal traces. Does not
cover: faults, processes, networks (sim/world.py).
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any

Do = Callable[[], None]
Entry = list[Any]  # [at, order, do or None]: a list, so that cancelling needs no search


class Heap:
    """`now` in seconds from the start. With `trace`, every noted line enters a sha256."""

    __slots__ = ("_asked", "_entries", "_rngs", "_trace", "now", "seed", "steps")

    def __init__(self, seed: int = 0, *, trace: bool = False):
        self.seed, self.now, self.steps = seed, 0.0, 0
        self._asked = 0
        self._entries: list[Entry] = []
        self._rngs: dict[str, random.Random] = {}
        self._trace = hashlib.sha256() if trace else None

    def rng(self, name: str) -> random.Random:
        """The chances of one name: drawing from one disturbs no other."""
        found = self._rngs.get(name)
        if found is None:
            found = self._rngs[name] = random.Random(f"{self.seed}/{name}")
        return found

    def at(self, when: float, do: Do) -> Entry:
        """Do something at a time, at the earliest now; the entry can be cancelled."""
        self._asked += 1
        entry: Entry = [when if when > self.now else self.now, self._asked, do]
        heapq.heappush(self._entries, entry)
        return entry

    def after(self, delay_s: float, do: Do) -> Entry:
        """Do something `delay_s` from now."""
        return self.at(self.now + delay_s, do)

    @staticmethod
    def cancel(entry: Entry) -> None:
        """Forget what was asked for; without effect on what has run."""
        entry[2] = None

    @property
    def pending(self) -> bool:
        """Whether anything is left that was not cancelled."""
        while self._entries and self._entries[0][2] is None:
            heapq.heappop(self._entries)
        return bool(self._entries)

    def note(self, what: str) -> None:
        """Add a line to the trace."""
        if self._trace is not None:
            self._trace.update(f"{self.now!r} {what}\n".encode())

    @property
    def trace(self) -> str:
        """Hex digest of everything noted so far; empty without a trace."""
        return self._trace.hexdigest() if self._trace is not None else ""

    def step(self) -> bool:
        """Run the next thing; False when nothing is left."""
        while self._entries:
            when, _, do = heapq.heappop(self._entries)
            if do is not None:
                self.now = when
                self.steps += 1
                do()
                return True
        return False

    def run(self, until: Callable[[], bool] | None = None, *, steps_max: int = 1 << 62) -> bool:
        """Run until `until` holds (asked after each step) or nothing is left.

        Returns: whether `until` holds; without it, whether nothing is left.
        """
        for _ in range(steps_max):
            if until is not None and until():
                return True
            if not self.step():
                return until is None or until()
        return False


class Alarm:
    """One thing that happens once, at a time that may be moved: the next event of an engine."""

    __slots__ = ("_do", "_entry", "_heap")

    def __init__(self, heap: Heap, do: Do):
        self._heap, self._do = heap, do
        self._entry: Entry | None = None

    def set(self, when: float | None) -> None:
        """Ring at `when` instead of whenever it was due; None: not at all."""
        entry = self._entry
        if entry is not None:
            if entry[0] == when:
                return
            entry[2] = None
        self._entry = None if when is None else self._heap.at(when, self._ring)

    def _ring(self) -> None:
        self._entry = None
        self._do()
