"""The times of a call: when it began, and how long it took.

Owns: the two clocks that are read for it. Promise: the length is measured on the steady clock, so
that a wall clock which is set meanwhile is charged to nobody. Does not cover: the waits of the
machine (it takes `now` as an argument).
"""

from __future__ import annotations

from collections.abc import Callable

from muster.clock import monotonic, wall


class Clocks:
    """Unix seconds for records, from both clocks."""

    def __init__(self, wall: Callable[[], float] = wall, steady: Callable[[], float] = monotonic):
        self._wall, self._steady = wall, steady

    def start(self) -> tuple[float, Callable[[], float]]:
        """Unix seconds now, and what tells the end in unix seconds."""
        start, began = self._wall(), self._steady()
        return start, lambda: start + (self._steady() - began)
