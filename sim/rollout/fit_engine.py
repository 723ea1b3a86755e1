"""Engine constants from recorded turns, all six at once, by the formulas of costs.py.

Owns: what of the engine's work lies in a turn's prefill and in its decode, and the robust fit.
Promise: pure; constants are never negative; where too few turns tell, the given ones stay. Does
not cover: waiting (the model makes its own).

A turn shares its replica, and steps are mixed (engine.py): one lasts its decode step and all the
prefill in it. So how long a decode took is one equation in all constants: its own steps, with the
batch and the context of each, and the prefills that ran within it. So is how long a prefill took:
all prefills of its step, and the decode step. No turn is left out for having had company: under
load none is alone, and those that were are the short ones of a quiet time.

Only what the turns span is asked of them: a curvature of prefill where long ones are many, a base
beside a slope where lengths or batches differ; else the given ratio stands. Errors are counted in
absolute time, those of long turns less (variance as time), far ones linearly (Huber), and in the
end the constants are scaled so that they explain the time that was spent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import ceil
from statistics import median

from msgspec.structs import astuple

from muster.entries import Turn
from muster.types import EpisodeState, StateInterval, Value
from sim.rollout.costs import EngineCosts
from sim.rollout.least import least

TURNS_MIN = 8
CHUNK_TOKENS = 2048  # of prefill in a step, where nothing else is known
_LONG_MIN = 12  # so many prefills near the longest carry a curvature
_LONG_SHARE = 0.5  # of the longest: what is near it
_LONG_TIMES = 8.0  # the median: otherwise lengths do not span one
_DIFFER = 1.5  # times from the lower to the upper decile: what differs
_ROUNDS, _HUBER, _CLIP = 25, 2.0, 6.0  # the latter two in robust standard deviations
_SETTLED = 1e-4  # a constant that moves less has settled
_EXACT, _LEAST_S = 1e-9, 1e-6  # smaller errors are none; a row explains at least so many seconds

Factors = tuple[float, float, float, float, float, float]
Row = tuple[Factors, float]
"""Factors of the constants in the order of EngineCosts, and the recorded seconds."""


class EngineFit(Value, frozen=True):
    """The constants, and what they were found from. curved: prefill's square was asked for."""

    costs: EngineCosts
    prefill: tuple[Row, ...]
    step: tuple[Row, ...]  # decodes: the fourth factor is their steps
    prefill_told: bool
    step_told: bool
    curved: bool = False


def fit_engine(
    turns: Sequence[Turn], given: EngineCosts, chunk_tokens: int = CHUNK_TOKENS
) -> EngineFit:
    """`given`: what stays where the turns do not tell; chunk_tokens: of prefill in one step."""
    by_replica: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        by_replica[turn.replica].append(turn)
    prefill: list[Row] = []
    step: list[Row] = []
    for found in by_replica.values():
        time = _Time(found, chunk_tokens)
        for turn in found:
            prefill += _prefill(turn, time, chunk_tokens)
            step += _step(turn, time)
    lengths = sorted(_uncached(turn) / 1000 for turn in turns if _spans(turn, EpisodeState.PREFILL))
    told = (len(prefill) >= TURNS_MIN, len(step) >= TURNS_MIN)
    curved = told[0] and _curved(lengths)
    known = astuple(given)
    basis = _prefill_basis(lengths, known, curved) if told[0] else []
    basis += _step_basis(step, known) if told[1] else []
    fixed = tuple(0.0 if told[n >= 3] else s for n, s in enumerate(known))
    rows = (prefill if told[0] else []) + (step if told[1] else [])
    costs = EngineCosts(*_robust(rows, basis, fixed)) if rows else given
    return EngineFit(costs, tuple(prefill), tuple(step), *told, curved)


def seconds(costs: EngineCosts, factors: Factors) -> float:
    """What a row takes with those constants."""
    return _dot(astuple(costs), factors)


# -- rows ----------------------------------------------------------------------------------


def _spans(turn: Turn, state: EpisodeState) -> list[StateInterval]:
    return [i for i in turn.intervals if i.state is state and i.end_unix_s > i.start_unix_s]


def _uncached(turn: Turn) -> int:
    return max(1, turn.prompt_tokens - turn.cached_tokens)


def _lasting(spans: Sequence[StateInterval]) -> float:
    return sum(i.end_unix_s - i.start_unix_s for i in spans)


_STEPS, _DECODES, _RATE, _CONTEXT = 3, 4, 5, 6  # of a state of the replica
_WIDTH = 7


class _Time:
    """Of one replica: integrals over its time between moments at which anything changes.

    Of the state: prefills per second (count, tokens, their squares), steps that these prefills are,
    decodes, their contexts; and what follows from it, see `_flows`.
    """

    def __init__(self, turns: Sequence[Turn], chunk_tokens: int):
        changes: dict[float, list[float]] = defaultdict(lambda: [0.0] * _WIDTH)
        decoding = []
        for turn in turns:
            uncached, spans = _uncached(turn), _spans(turn, EpisodeState.PREFILL)
            if spans:
                each, x = 1 / _lasting(spans), uncached / 1000
                steps = ceil(uncached / chunk_tokens) * each
                _change(changes, spans, (each, x * each, x * x * each, steps, 0.0, 0.0, 0.0))
            spans = _spans(turn, EpisodeState.DECODE)
            if spans:
                context = turn.prompt_tokens + turn.sampled_tokens / 2
                _change(changes, spans, (0.0, 0.0, 0.0, 0.0, 1.0, 0.0, context))
                decoding.append((turn, spans))
        running = _counts(turns)
        self._integrate(changes, running)
        for turn, spans in decoding:
            # A step with prefill lasts as long as that: the other steps are in the time left.
            sums = self.within(spans)
            free, made = sums[9], max(0.0, turn.sampled_tokens - 1 - sums[10])
            rate = made / free if free > 0 else 0.0
            _change(changes, spans, (0.0, 0.0, 0.0, 0.0, 0.0, rate, 0.0))
        self._integrate(changes, running)

    def _integrate(self, changes: dict[float, list[float]], running: dict[float, int]) -> None:
        self._sums: dict[float, list[float]] = {}
        state, sums, last, prefills = [0.0] * _WIDTH, [0.0] * 11, 0.0, 0
        for at in sorted(changes):
            flows = _flows(state, prefills)
            sums = [s + v * (at - last) for s, v in zip(sums, flows, strict=True)]
            self._sums[at] = sums
            state, last = [a + b for a, b in zip(state, changes[at], strict=True)], at
            prefills += running.get(at, 0)

    def within(self, spans: Sequence[StateInterval]) -> list[float]:
        """Over intervals of a turn that it was made of: their ends are known moments."""
        total = [0.0] * 11
        for i in spans:
            ends = zip(self._sums[i.start_unix_s], self._sums[i.end_unix_s], strict=True)
            total = [t + b - a for t, (a, b) in zip(total, ends, strict=True)]
        return total


def _counts(turns: Iterable[Turn]) -> dict[float, int]:
    """Prefills more, by moment."""
    found: dict[float, int] = defaultdict(int)
    for turn in turns:
        for i in _spans(turn, EpisodeState.PREFILL):
            found[i.start_unix_s] += 1
            found[i.end_unix_s] -= 1
    return found


def _change(
    changes: dict[float, list[float]], spans: Sequence[StateInterval], by: tuple[float, ...]
) -> None:
    for i in spans:
        changes[i.start_unix_s] = [a + b for a, b in zip(changes[i.start_unix_s], by, strict=True)]
        changes[i.end_unix_s] = [a - b for a, b in zip(changes[i.end_unix_s], by, strict=True)]


def _flows(state: Sequence[float], prefills: int) -> tuple[float, ...]:
    """Per second: prefills, tokens, squares; decoding at all, decodes, contexts; steps, their
    batch, their context; no prefill; steps with prefill."""
    decodes = round(state[_DECODES])
    context = state[_CONTEXT] if decodes else 0.0
    mixed = state[_STEPS] / prefills if prefills else 0.0
    speed = mixed if prefills else state[_RATE] / decodes if decodes else 0.0
    batch = (float(decodes > 0), float(decodes), context)
    steps = (speed, speed * decodes, speed * context)
    return (*state[:_STEPS], *batch, *steps, float(prefills == 0), mixed)


def _step(turn: Turn, time: _Time) -> list[Row]:
    """Its decode, if it has one; the first token ends the prefill."""
    spans, made = _spans(turn, EpisodeState.DECODE), turn.sampled_tokens - 1
    if not spans or made < 1:
        return []
    sums = time.within(spans)
    times = made / sums[6] if sums[6] > 0 else 0.0
    prefills = (max(0.0, sums[0]), max(0.0, sums[1]), max(0.0, sums[2]))
    return [((*prefills, float(made), times * sums[7], times * sums[8]), _lasting(spans))]


def _prefill(turn: Turn, time: _Time, chunk_tokens: int) -> list[Row]:
    """Its prefill, if it has one, with all that ran beside it."""
    spans = _spans(turn, EpisodeState.PREFILL)
    if not spans:
        return []
    lasting, sums = _lasting(spans), time.within(spans)
    steps = ceil(_uncached(turn) / chunk_tokens) / lasting
    decode = (steps * sums[3], steps * sums[4], steps * sums[5])
    return [((sums[0], sums[1], sums[2], *decode), lasting)]


# -- what is asked of them -----------------------------------------------------------------


def _curved(lengths: Sequence[float]) -> bool:
    """Long prefills are many, and much longer than most."""
    if len(lengths) < _LONG_MIN:
        return False
    long = lengths[-_LONG_MIN]
    return long >= _LONG_SHARE * lengths[-1] and long >= _LONG_TIMES * median(lengths)


def _differ(values: Sequence[float]) -> bool:
    found = sorted(values)
    return _quantile(found, 0.9) >= _DIFFER * _quantile(found, 0.1)


def _quantile(found: Sequence[float], share: float) -> float:
    return found[round(share * (len(found) - 1))]


def _prefill_basis(
    lengths: Sequence[float], given: tuple[float, ...], curved: bool
) -> list[Factors]:
    """Directions of the constants that may be chosen freely."""
    if not _differ(lengths):
        return [(given[0], given[1], given[2], 0.0, 0.0, 0.0)]
    found: list[Factors] = [(1.0, 0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)]
    return [*found, (0.0, 0.0, 1.0, 0.0, 0.0, 0.0)] if curved else found


def _step_basis(rows: Sequence[Row], given: tuple[float, ...]) -> list[Factors]:
    """The same of a step: batches must differ, and contexts not only with the batch."""
    if not _differ([f[4] / f[3] for f, _ in rows]):
        return [(0.0, 0.0, 0.0, given[3], given[4], given[5])]
    base: Factors = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    if not _differ([f[5] / f[4] for f, _ in rows if f[4] > 0]):
        return [base, (0.0, 0.0, 0.0, 0.0, given[4], given[5])]
    return [base, (0.0, 0.0, 0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)]


# -- fit -----------------------------------------------------------------------------------


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _robust(
    rows: Sequence[Row], basis: Sequence[Factors], fixed: Sequence[float]
) -> tuple[float, ...]:
    """Constants ≥ 0 of the least Huber loss; `fixed` are those that nothing tells."""
    columns = [[_dot(f, direction) for direction in basis] for f, _ in rows]
    wanted = [y - _dot(fixed, f) for f, y in rows]
    usual = [1 / y for _, y in rows]
    weights, chosen, spread = usual, [0.0] * len(basis), 0.0
    for _ in range(_ROUNDS):
        before, chosen = chosen, least(columns, wanted, weights)
        if all(abs(a - b) <= _SETTLED * a for a, b in zip(chosen, before, strict=True)):
            break
        told = [_dot(chosen, column) for column in columns]
        # By the explained time: by the recorded one, the fastest would count most.
        usual = [
            1 / max(t + _dot(fixed, f), _LEAST_S) for t, (f, _) in zip(told, rows, strict=True)
        ]
        errors = [abs(t - w) * u**0.5 for t, w, u in zip(told, wanted, usual, strict=True)]
        spread = max(1.4826 * median(errors), _EXACT)
        weights = [
            u * min(1.0, _HUBER * spread / e) if e else u
            for u, e in zip(usual, errors, strict=True)
        ]
    scale = _scale(columns, wanted, chosen, [_CLIP * spread / u**0.5 for u in usual])
    free = [scale * sum(c * d[n] for c, d in zip(chosen, basis, strict=True)) for n in range(6)]
    return tuple(a + b for a, b in zip(fixed, free, strict=True))


def _scale(
    columns: Sequence[Sequence[float]],
    wanted: Sequence[float],
    chosen: Sequence[float],
    bounds: Sequence[float],
) -> float:
    """Recorded time over explained time, where no row counts for more than its bound beyond."""
    recorded = explained = 0.0
    for column, y, bound in zip(columns, wanted, bounds, strict=True):
        told = _dot(chosen, column)
        explained += told
        recorded += min(max(y, told - bound), told + bound)
    return recorded / explained if explained > 0 and recorded > 0 else 1.0
