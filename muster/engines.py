"""What each replica did over time: its token rate, and which share of its episodes was in boxes.

Owns: gpu_seconds_waiting_on_environments. Promise: pure; per replica
∫ (1 − token rate ÷ peak rate) × (episodes in a box state ÷ episodes) dt, from the recorded
intervals and sampled tokens alone. Box states: box start, tool, verification. An episode belongs to
the replica of its turn, a verification to that of the last turn; a hold is no environment's time.

Token rate: a turn's sampled tokens, spread evenly over its decode intervals. Peak rate: the best
rate that the replica kept over PEAK_WINDOW_S anywhere in the run; no calibration exists yet, so a
run that never filled its replica understates the peak, and with it the waiting.
Does not cover: engines that are busy with nobody's tokens (publication, prefill of others' runs).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise

from muster.entries import Finish, Turn
from muster.run_index import RunIndex
from muster.types import EpisodeState, StateInterval, Value

PEAK_WINDOW_S = 1.0
BOX_STATES = frozenset({EpisodeState.BOX_START, EpisodeState.TOOL, EpisodeState.VERIFY})
_EPISODE_STATES = BOX_STATES | {EpisodeState.QUEUE, EpisodeState.PREFILL, EpisodeState.DECODE}


class Stretch(Value, frozen=True):
    """A piece of time in which nothing about a replica changes."""

    start_unix_s: float
    end_unix_s: float
    tokens_per_s: float
    episodes: int
    in_boxes: int


class Engine(Value, frozen=True):
    """One replica over the run."""

    replica: str
    peak_tokens_per_s: float
    stretches: tuple[Stretch, ...]

    def waiting_s(self, start: float, end: float) -> float:
        """gpu_seconds_waiting_on_environments within [start, end)."""
        total = 0.0
        first = bisect_right(self.stretches, start, key=lambda s: s.end_unix_s)
        for s in islice(self.stretches, first, None):
            if s.start_unix_s >= end:
                break
            seconds = min(s.end_unix_s, end) - max(s.start_unix_s, start)
            if seconds > 0 and s.episodes and self.peak_tokens_per_s:
                idle = max(0.0, 1.0 - s.tokens_per_s / self.peak_tokens_per_s)
                total += idle * s.in_boxes / s.episodes * seconds
        return total

    def decoding_s(self, start: float, end: float) -> float:
        """Seconds within [start, end) in which it sampled tokens."""
        total = 0.0
        first = bisect_right(self.stretches, start, key=lambda s: s.end_unix_s)
        for s in islice(self.stretches, first, None):
            if s.start_unix_s >= end:
                break
            if s.tokens_per_s > 0:
                total += max(0.0, min(s.end_unix_s, end) - max(s.start_unix_s, start))
        return total


def engines(index: RunIndex) -> tuple[Engine, ...]:
    """Every replica that a turn names, by name."""
    changes: dict[str, list[_Change]] = defaultdict(list)
    for attempts in index.attempts.values():
        for events in attempts.values():
            replica = ""
            for event in events:
                if isinstance(event, Turn):
                    replica = event.replica
                    changes[replica] += _changes(event.intervals, event.sampled_tokens)
                elif isinstance(event, Finish) and replica:
                    changes[replica] += _changes(event.intervals, 0)
    return tuple(_engine(name, found) for name, found in sorted(changes.items()) if name)


_Change = tuple[float, float, int, int]  # at, rate by, episodes by, of these in boxes by


def _changes(intervals: Sequence[StateInterval], tokens: int) -> Iterable[_Change]:
    decoding = sum(_length(i) for i in intervals if i.state is EpisodeState.DECODE)
    for i in intervals:
        if _length(i) > 0 and i.state in _EPISODE_STATES:
            rate = tokens / decoding if i.state is EpisodeState.DECODE else 0.0
            boxed = int(i.state in BOX_STATES)
            yield i.start_unix_s, rate, 1, boxed
            yield i.end_unix_s, -rate, -1, -boxed


def _length(interval: StateInterval) -> float:
    return max(0.0, interval.end_unix_s - interval.start_unix_s)


def _engine(name: str, changes: list[_Change]) -> Engine:
    changes.sort()
    stretches: list[Stretch] = []
    rate, episodes, boxed, since = 0.0, 0, 0, 0.0
    for at, by, more, more_boxed in changes:
        if at > since and episodes:
            stretches.append(Stretch(since, at, max(0.0, rate), episodes, boxed))
        rate, episodes, boxed, since = rate + by, episodes + more, boxed + more_boxed, at
        rate = rate if episodes else 0.0  # what rounding has left
    return Engine(name, peak(stretches), tuple(stretches))


def peak(stretches: Sequence[Stretch], window_s: float = PEAK_WINDOW_S) -> float:
    """Most tokens per second over any `window_s` of time; 0 without any.

    A window that is best can be moved until an edge of it meets an edge of a stretch, so only
    those that begin or end there are tried.
    """
    if not stretches:
        return 0.0
    # Cumulative tokens at each edge; linear in between.
    times, made = [stretches[0].start_unix_s], [0.0]
    for s in stretches:
        if s.start_unix_s > times[-1]:
            times.append(s.start_unix_s)
            made.append(made[-1])
        times.append(s.end_unix_s)
        made.append(made[-1] + s.tokens_per_s * (s.end_unix_s - s.start_unix_s))
    starts = _at(times, made, times)
    forward = _at(times, made, [t + window_s for t in times])
    backward = _at(times, made, [t - window_s for t in times])
    best = max(
        *(b - a for a, b in zip(starts, forward, strict=True)),
        *(a - b for a, b in zip(starts, backward, strict=True)),
    )
    return best / window_s


def _at(times: Sequence[float], made: Sequence[float], asked: Sequence[float]) -> list[float]:
    """Cumulative tokens at ascending moments; one pass over both."""
    found, n = [], 0
    pairs = list(pairwise(zip(times, made, strict=True)))
    for t in asked:
        while n < len(pairs) and pairs[n][1][0] < t:
            n += 1
        if n == len(pairs):
            found.append(made[-1])
            continue
        (t0, m0), (t1, m1) = pairs[n]
        found.append(m0 if t <= t0 or t1 == t0 else m0 + (m1 - m0) * (t - t0) / (t1 - t0))
    return found
