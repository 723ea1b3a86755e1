"""Where the time to a trainable batch went.

Owns: the split of a window over the states of the siblings that still block the batch, and the
straggler tail. Promise: the parts sum to the window; each instant is shared equally among the
blocking siblings. Pure. Does not cover: which siblings a batch has, and when it began (report.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from muster.types import EpisodeState, StateInterval, Value

TRANSFER = "transfer"
"""All siblings are done and the batch is not yet complete: records travel to the bank."""

PARTS: tuple[str, ...] = (*(str(state) for state in EpisodeState), TRANSFER)


class Lane(Value, frozen=True):
    """One sibling of a batch over time, all its attempts up to the one that counts.

    Where intervals overlap, the one that began last says the state (a later attempt over an
    abandoned one); where there is none, the sibling waits in the queue.
    """

    intervals: tuple[StateInterval, ...]
    done_unix_s: float  # infinite while it is not


def split(lanes: Sequence[Lane], start: float, end: float) -> dict[str, float]:
    """Seconds of [start, end) by part; every part is present, all sum to max(0, end - start)."""
    changes = sorted(
        change for lane in lanes for piece in pieces(lane, start, end) for change in _edges(*piece)
    )
    shares: dict[str, list[float]] = {part: [] for part in PARTS}
    counts = dict.fromkeys(PARTS, 0)
    blocking, now = 0, start
    for at, step, part in changes:
        _attribute(shares, counts, blocking, at - now)
        counts[part] += step
        blocking += step
        now = at
    _attribute(shares, counts, blocking, max(end, start) - now)
    return {part: math.fsum(pieces) for part, pieces in shares.items()}


def straggler_tail(done: Sequence[float]) -> float:
    """Seconds from 90 % of the trajectories done to all of them done; 0 without any."""
    if not done:
        return 0.0
    ordered = sorted(done)
    return ordered[-1] - ordered[math.ceil(0.9 * len(ordered)) - 1]


def _attribute(
    shares: dict[str, list[float]], counts: dict[str, int], blocking: int, seconds: float
) -> None:
    if seconds <= 0:
        return
    if not blocking:
        shares[TRANSFER].append(seconds)
        return
    for part, count in counts.items():
        if count:
            shares[part].append(seconds * count / blocking)


def _edges(start: float, end: float, part: str) -> tuple[tuple[float, int, str], ...]:
    return (start, 1, part), (end, -1, part)


def pieces(lane: Lane, start: float, end: float) -> Iterator[tuple[float, float, str]]:
    """(from, to, state): disjoint stretches that cover [start, min(end, done))."""
    end = min(end, lane.done_unix_s)
    if not start < end:
        return
    spans = sorted(
        (max(i.start_unix_s, start), i.start_unix_s, min(i.end_unix_s, end), number, str(i.state))
        for number, i in enumerate(lane.intervals)
        if max(i.start_unix_s, start) < min(i.end_unix_s, end)
    )
    marks = sorted({start, end, *(s[0] for s in spans), *(s[2] for s in spans)})
    open_: list[tuple[float, int, float, str]] = []  # the one that began last is first
    following = 0
    for a, b in pairwise(marks):
        while following < len(spans) and spans[following][0] <= a:
            _, began, ends, number, state = spans[following]
            heapq.heappush(open_, (-began, -number, ends, state))
            following += 1
        while open_ and open_[0][2] <= a:
            heapq.heappop(open_)
        yield a, b, open_[0][3] if open_ else str(EpisodeState.QUEUE)
