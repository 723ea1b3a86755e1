"""What a host has done since it began, and how long it took. Pure.

Promise: bounded: of durations the newest `_KEPT` of each kind count. Does not cover: what the host
does now (pool.py), load and memory (adapters/hostload.py).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Literal

from muster.types import Value

_KEPT = 1024
Timed = Literal["start", "step", "fork", "wait", "verify", "end", "set_up"]
Cause = Literal[
    "task",
    "set_up",
    "start",
    "snapshot",
    "squash",
    "drop",
    "step",
    "verify",
    "copy",
    "end",
    "note",
    "adopt",
]


class Quantiles(Value, frozen=True):
    """Of the newest durations in seconds; count: of all."""

    count: int
    p50: float
    p90: float
    p99: float


class Counts:
    """Counters of one host.

    failures: of the host's own parts, by cause; `task`: of calls for what cannot be had here.
    """

    def __init__(self) -> None:
        self.acquired: Counter[str] = Counter()  # by source
        self.steps = self.verified = self.released = self.adopted = self.warm_dead = 0
        self.failures: Counter[Cause] = Counter()
        self._seconds: dict[Timed, deque[float]] = {}
        self._counts: Counter[Timed] = Counter()

    def took(self, kind: Timed, seconds: float) -> None:
        self._seconds.setdefault(kind, deque(maxlen=_KEPT)).append(seconds)
        self._counts[kind] += 1

    def seconds(self) -> dict[str, Quantiles]:
        """By kind, of those that happened."""
        return {kind: _quantiles(self._counts[kind], took) for kind, took in self._seconds.items()}


def _quantiles(count: int, found: deque[float]) -> Quantiles:
    ordered = sorted(found)

    def at(share: float) -> float:
        """The smallest that at least this share does not exceed."""
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Quantiles(count, at(0.5), at(0.9), at(0.99))
