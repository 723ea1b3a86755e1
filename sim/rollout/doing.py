"""Where the time of a batch goes: the states of the siblings that block it, in equal shares.

Owns: the states (DESIGN §9), a sibling's timeline, the split of an interval. Promise: the shares of
an interval sum to its length. Does not cover: who feeds it (measure.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from enum import StrEnum


class Doing(StrEnum):
    """What a sibling is doing; every instant belongs to one."""

    QUEUE = "queue"  # for an engine, for a box, or not launched yet
    PREFILL = "prefill"
    DECODE = "decode"
    BOX_START = "box_start"
    TOOL = "tool"
    VERIFY = "verify"
    HOLD = "hold"  # held back by the router, or done and waiting to run again with its group
    TRANSFER = "transfer"  # nothing blocks the batch: it is being handed over


BOX_STATES = frozenset({Doing.BOX_START, Doing.TOOL, Doing.VERIFY})


class Timeline:
    """What one sibling did, over all its attempts; `done_at` of the attempt that counts."""

    __slots__ = ("changes", "done_at")

    def __init__(self) -> None:
        self.changes: list[tuple[float, Doing]] = []
        self.done_at: float | None = None

    def between(self, start: float, end: float) -> Iterable[tuple[Doing, float, float]]:
        """(state, from, to) within [start, end]; before the first change it queues."""
        state, since = Doing.QUEUE, start
        for at, new in self.changes:
            if at >= end:
                break
            if at > since:
                yield state, since, at
                since = at
            state = new
        if end > since:
            yield state, since, end


def split(timelines: Iterable[Timeline], start: float, end: float) -> dict[Doing, float]:
    """Seconds of [start, end] by state: each instant in equal shares to who is not done yet.

    With W(t) = ∫ dt / (siblings not done), a sibling in a state from a to b adds W(b) - W(a): one
    look-up per change, however many siblings there are.
    """
    lines = [(x, end if x.done_at is None else min(x.done_at, end)) for x in timelines]
    lines = [(line, done) for line, done in lines if done > start]
    knots = sorted({done for _, done in lines})
    dones = sorted(done for _, done in lines)
    times, weights, rates = [start], [0.0], []
    for knot in knots:
        rate = 1.0 / (len(dones) - bisect_right(dones, times[-1]))
        weights.append(weights[-1] + (knot - times[-1]) * rate)
        times.append(knot)
        rates.append(rate)
    rates.append(0.0)
    found = dict.fromkeys(Doing, 0.0)
    for line, done in lines:
        at = 0.0
        for state, _, until in line.between(start, done):
            cell = bisect_right(times, until) - 1
            here = weights[cell] + (until - times[cell]) * rates[cell]
            found[state] += here - at
            at = here
    found[Doing.TRANSFER] += end - times[-1]
    return found
