"""How late the event loop of this process is: the gauge `event-loop lag` of DESIGN §9.

Owns: the samples, the log line. Promise: a timer is due every 10 ms, and each one that was due
counts with its own delay, so a stall of a second weighs as much as the hundred timers that it
delayed; memory is bounded by one window. Does not cover: what held the loop up (a profile does).
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from muster import telemetry
from muster.types import Value

_EVERY_S = 0.01
_STALL_MAX = 6000  # timers that one stall can count as: a minute
EDGES_MS = (1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 75, 100, 200, 500, 1000)
"""Upper edges of the counts that a window tells, so that windows can be added up."""
_log = telemetry.logger("muster.lag")


class Lag(Value, frozen=True):
    """Delays of one window in milliseconds, and how many timers were due in it.

    counts: how many were later than the edge before and at most so late, for each of EDGES_MS and,
    last, for all that were later still.
    """

    timers: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    counts: tuple[int, ...]


class LoopLag:
    """Samples the running loop and tells once a window; `stop()` ends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tell_s: float):
        self._loop, self._tell_s = loop, tell_s
        self._late_ms: list[float] = []
        self._due = loop.time() + _EVERY_S
        self._told = loop.time()
        self._timer = loop.call_at(self._due, self._sample)

    def stop(self) -> None:
        self._timer.cancel()

    def _sample(self) -> None:
        now = self._loop.time()
        late, self._due = delays_ms(self._due, now)
        self._late_ms += late
        if now - self._told >= self._tell_s:
            found = summary(self._late_ms)
            self._late_ms, self._told = [], now
            _log.info("event-loop lag", extra=msgspec.structs.asdict(found))
        self._timer = self._loop.call_at(self._due, self._sample)


def delays_ms(due: float, now: float) -> tuple[list[float], float]:
    """Delays of all timers that were due until now, the first at `due`; when the next is due."""
    missed = min(_STALL_MAX, max(1, int((now - due) / _EVERY_S) + 1))
    late = [max(0.0, (now - due - n * _EVERY_S) * 1e3) for n in range(missed)]
    return late, max(now, due + missed * _EVERY_S)


def summary(late_ms: Sequence[float]) -> Lag:
    """Of at least one delay."""
    ordered = sorted(late_ms)
    last = len(ordered) - 1
    upto = [0, *(bisect_right(ordered, edge) for edge in EDGES_MS), len(ordered)]
    counts = tuple(more - less for less, more in pairwise(upto))
    return Lag(len(ordered), ordered[last // 2], ordered[int(last * 0.99)], ordered[-1], counts)


def quantile_ms(counts: Sequence[int], share: float) -> float:
    """Of `counts` as in Lag, of one window or added up: the edge that this share of the timers did
    not pass, infinite when it lies beyond the last one. ValueError when there are none."""
    left = share * sum(counts)
    if not left:
        raise ValueError("no timer was due")
    for edge, count in zip((*EDGES_MS, math.inf), counts, strict=True):
        left -= count
        if left <= 0:
            return float(edge)
    return math.inf
