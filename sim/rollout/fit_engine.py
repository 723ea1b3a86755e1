"""Engine constants from recorded turns: least squares, by the formulas of costs.py.

Owns: what of a turn's prefill and decode time an engine spent on that turn alone, and the fit.
Promise: pure; constants are never negative; where too few turns tell, the given ones stay. Does
not cover: waiting (the model makes its own).

A turn shares its replica, and its steps are mixed (engine.py): a step with prefill in it lasts the
decode step and the prefill. So a decode counts where no prefill ran, with the tokens made there;
then a prefill counts less the decode steps in it, and, where there are enough of them, only those
prefills that had none beside them. Batch and context of a step are means over the turn's decode.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import ceil
from statistics import median

from muster.entries import Turn
from muster.types import EpisodeState, StateInterval, Value
from sim.rollout.costs import EngineCosts

TURNS_MIN = 8
_ALONE_MIN = 30  # so many prefills with none beside them are enough
_CHUNK_TOKENS = 2048  # of prefill in a step
_SAMPLED_MIN = 8  # a shorter reply says nothing about a step
_OUTLIERS = 3.0  # times the median residual

Row = tuple[tuple[float, float, float], float]  # factors of the three constants, seconds


class EngineFit(Value, frozen=True):
    """The constants, and what they were found from: rows of factors and recorded seconds."""

    costs: EngineCosts
    prefill: tuple[Row, ...]
    step: tuple[Row, ...]
    prefill_told: bool
    step_told: bool


class _Sums(Value, frozen=True):
    """Integrals over a stretch of one replica's time."""

    share: float = 0.0  # dt / prefills, where there are any
    steps: float = 0.0  # that had prefill in them
    free: float = 0.0  # seconds without prefill
    batch: float = 0.0  # decoding requests × seconds, all of the time
    context: float = 0.0  # their contexts × seconds
    free_batch: float = 0.0  # the same without prefill
    free_context: float = 0.0


def _spans(turn: Turn, state: EpisodeState) -> list[StateInterval]:
    return [i for i in turn.intervals if i.state is state and i.end_unix_s > i.start_unix_s]


def _uncached(turn: Turn) -> int:
    return max(1, turn.prompt_tokens - turn.cached_tokens)


class _Time:
    """Of one replica: integrals over time, for stretches between known moments."""

    def __init__(self, turns: Iterable[Turn]):
        changes: list[tuple[float, int, float, int, float]] = []
        for turn in turns:
            context = turn.prompt_tokens + turn.sampled_tokens / 2
            for i in _spans(turn, EpisodeState.PREFILL):
                steps = ceil(_uncached(turn) / _CHUNK_TOKENS)
                rate = steps / (i.end_unix_s - i.start_unix_s)
                changes += [(i.start_unix_s, 1, rate, 0, 0.0), (i.end_unix_s, -1, -rate, 0, 0.0)]
            for i in _spans(turn, EpisodeState.DECODE):
                changes += [(i.start_unix_s, 0, 0.0, 1, context)]
                changes += [(i.end_unix_s, 0, 0.0, -1, -context)]
        changes.sort()
        self._at = [0.0]
        self._sums = [_Sums()]
        prefills = decodes = 0
        rate = contexts = 0.0
        for at, more_prefills, more_rate, more_decodes, more_context in changes:
            self._to(at, prefills, rate, decodes, contexts)
            prefills, decodes = prefills + more_prefills, decodes + more_decodes
            rate, contexts = rate + more_rate, contexts + more_context

    def _to(self, at: float, prefills: int, rate: float, decodes: int, contexts: float) -> None:
        seconds, old = at - self._at[-1], self._sums[-1]
        free = 0.0 if prefills else seconds
        self._at.append(at)
        self._sums.append(
            _Sums(
                old.share + (seconds / prefills if prefills else 0.0),
                old.steps + (rate / prefills * seconds if prefills else 0.0),
                old.free + free,
                old.batch + decodes * seconds,
                old.context + contexts * seconds,
                old.free_batch + decodes * free,
                old.free_context + contexts * free,
            )
        )

    def within(self, spans: Sequence[StateInterval]) -> _Sums:
        """Over intervals that are this replica's own: their ends are known moments."""
        total = [0.0] * len(_Sums.__struct_fields__)
        for i in spans:
            first = self._sums[bisect_right(self._at, i.start_unix_s) - 1]
            last = self._sums[bisect_right(self._at, i.end_unix_s) - 1]
            for n, field in enumerate(_Sums.__struct_fields__):
                total[n] += getattr(last, field) - getattr(first, field)
        return _Sums(*total)


def fit_engine(turns: Sequence[Turn], given: EngineCosts) -> EngineFit:
    """`given`: what stays where the turns do not tell."""
    by_replica: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        by_replica[turn.replica].append(turn)
    times = [(_Time(found), found) for found in by_replica.values()]
    step = [r for time, found in times for turn in found if (r := _step(turn, time)) is not None]
    step_s = _solved(step)
    known = step_s or (given.decode_base_s, given.decode_request_s, given.decode_context_s)
    told = [_prefill(turn, time, known) for time, found in times for turn in found]
    alone = [row for row, is_alone in told if row is not None and is_alone]
    prefill = alone if len(alone) >= _ALONE_MIN else [row for row, _ in told if row is not None]
    prefill_s = _solved(prefill)
    costs = EngineCosts(
        *(prefill_s or (given.prefill_base_s, given.prefill_linear_s, given.prefill_square_s)),
        *known,
    )
    told_both = (prefill_s is not None, step_s is not None)
    return EngineFit(costs, tuple(prefill), tuple(step), *told_both)


def _step(turn: Turn, time: _Time) -> Row | None:
    spans = _spans(turn, EpisodeState.DECODE)
    sums = time.within(spans)
    made = turn.sampled_tokens - 1 - sums.steps  # the first one ends the prefill
    if made < _SAMPLED_MIN or sums.free <= 0:
        return None
    factors = (1.0, sums.free_batch / sums.free, sums.free_context / sums.free)
    return factors, sums.free / made


def _prefill(
    turn: Turn, time: _Time, step_s: tuple[float, float, float]
) -> tuple[Row | None, bool]:
    """Its row, and whether no other prefill ran beside it."""
    spans = _spans(turn, EpisodeState.PREFILL)
    whole = sum(i.end_unix_s - i.start_unix_s for i in spans)
    if whole <= 0:
        return None, False
    sums = time.within(spans)
    batch = sums.batch / whole
    decode = _dot(step_s, (1.0, batch, sums.context / whole)) if batch > 0 else 0.0
    uncached = _uncached(turn)
    seconds = sums.share * (1 - ceil(uncached / _CHUNK_TOKENS) * decode / whole)
    x = uncached / 1000
    row = ((1.0, x, x * x), seconds) if seconds > 0 else None
    return row, sums.share >= 0.98 * whole


def _solved(rows: Sequence[Row]) -> tuple[float, float, float] | None:
    """Constants ≥ 0 of the least relative squares, twice: the second time without outliers."""
    if len(rows) < TURNS_MIN:
        return None
    first = _least(rows)
    errors = [abs(_dot(first, factors) / y - 1) for factors, y in rows]
    bound = _OUTLIERS * sorted(errors)[len(errors) // 2]
    kept = [row for row, error in zip(rows, errors, strict=True) if error <= bound]
    found = _least(kept) if len(kept) >= TURNS_MIN else first
    # Relative squares lean to the fastest turns: half of all are to be above, half below.
    scale = median(y / _dot(found, factors) for factors, y in rows)
    return found[0] * scale, found[1] * scale, found[2] * scale


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _least(rows: Sequence[Row]) -> tuple[float, float, float]:
    """The best of all choices of constants that are not zero: with three there are seven."""
    scaled = [([f / y for f in factors], y) for factors, y in rows]
    moments = [[sum(f[i] * f[j] for f, _ in scaled) for j in range(3)] for i in range(3)]
    sums = [sum(f[i] for f, _ in scaled) for i in range(3)]
    best, least = (0.0, 0.0, 0.0), float("inf")
    for count in (3, 2, 1):
        for chosen in combinations(range(3), count):
            found = _linear(
                [[moments[i][j] for j in chosen] for i in chosen], [sums[i] for i in chosen]
            )
            if found is None or min(found) < 0:
                continue
            whole = [0.0, 0.0, 0.0]
            for i, value in zip(chosen, found, strict=True):
                whole[i] = value
            error = sum((_dot(whole, f) - 1) ** 2 for f, _ in scaled)
            if error < least - 1e-12:
                best, least = (whole[0], whole[1], whole[2]), error
    return best


def _linear(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss with pivots; None when it is singular to within rounding."""
    n = len(right)
    scale = [max(matrix[i][i], 0.0) ** 0.5 for i in range(n)]
    if min(scale) == 0.0:
        return None
    rows = [
        [matrix[i][j] / scale[i] / scale[j] for j in range(n)] + [right[i] / scale[i]]
        for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        if abs(rows[pivot][i]) < 1e-9:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for other in range(n):
            if other != i:
                factor = rows[other][i] / rows[i][i]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[i], strict=True)]
    return [rows[i][n] / rows[i][i] / scale[i] for i in range(n)]
