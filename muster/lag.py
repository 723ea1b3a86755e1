"""How late the event loop of this process is: the gauge `event-loop lag` of DESIGN §9.

Owns: the samples, the log line. Promise: a timer is due every 10 ms, and each one that was due
counts with its own delay, so a stall of a second weighs as much as the hundred timers that it
delayed; memory is bounded by one window. Does not cover: what held the loop up (a profile does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from muster import telemetry
from muster.types import Value

_EVERY_S = 0.01
_STALL_MAX = 6000  # timers that one stall can count as: a minute
_log = telemetry.logger("muster.lag")


class Lag(Value, frozen=True):
    """Delays of one window in milliseconds, and how many timers were due in it."""

    timers: int
    p50_ms: float
    p99_ms: float
    max_ms: float


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
    return Lag(len(ordered), ordered[last // 2], ordered[int(last * 0.99)], ordered[-1])
