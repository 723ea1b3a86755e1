"""The figures of one simulated run, made from what was recorded.

Owns: medians, distances, slopes, their exact meaning. Promise: pure. Does not cover: comparing
arms and confidence (the benchmark).
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence

from muster.types import Value
from sim.rollout.measure import Batch, Recorder, Sample

SETTLING, STEADY_MIN = 6, 5
"""Batches before the work in progress has its mix, and least ones after them. Arms that carry work
on train the short groups first, while their engines fill with the long ones: those batches measure
neither speed nor work done for work trained. Six are more than the oldest hundredth waits."""
COLD_BATCHES = 3  # launch cohorts before this many cuts are left out of the bias
COHORT_MIN = 64  # trajectories: the worst distance is taken over cohorts of at least this size


class Fleet(Value, frozen=True):
    """What the engines say at one time, per replica; sums are of the run so far."""

    at: float
    busy_s: tuple[float, ...]
    sampled_tokens: int
    prefilled_tokens: int


class RunFigures(Value, frozen=True):
    """One arm, one regime, one seed. Steady: see `steady`."""

    arm: str
    regime: str
    seed: int
    batches: int
    first_batch_s: float  # cold, from the first launch
    interval_s: float  # median of the steady batches
    interval_mean_s: float
    intervals_s: tuple[float, ...]
    split_s: dict[str, float]  # mean seconds per steady batch by state: sums to interval_mean_s
    tail_s: float  # median straggler tail
    recomputed_tokens: float  # per steady batch
    prefilled_tokens: float  # per steady batch
    ks_worst: float  # of cohorts with at least COHORT_MIN trajectories
    ks_mean: float  # weighted by the size of the cohort
    fates: float  # share of launched groups that got one
    lag_p50: float  # batches
    lag_max: int
    lag_slope: float  # batches per 1,000 s of duration; this and the ages of whole cohorts only
    age_p50_s: float
    age_p99_s: float
    gpu_wait_s: float  # gpu_seconds_waiting_on_environments per steady batch, all replicas
    busy: float  # share of engine time, steady
    busy_worst: float  # busiest replica against the mean
    attempts: int
    lost: int  # attempts that the infrastructure took
    turns: int


def steady(batches: Sequence[Batch]) -> Sequence[Batch]:
    """The batches after the first SETTLING; after the cold first one in a shorter run."""
    late = batches[SETTLING:]
    return late if len(late) >= STEADY_MIN else batches[1:] or batches


def figures(
    recorder: Recorder, fleets: Sequence[Fleet], *, arm: str, regime: str, seed: int
) -> RunFigures:
    """`fleets`: one per cut, in order. Needs at least one batch."""
    batches = recorder.batches
    settled = steady(batches)
    before = len(batches) - len(settled)
    intervals = tuple(batch.interval_s for batch in settled)
    start, end = (fleets[before - 1] if before else _nothing(fleets[0])), fleets[-1]
    counted = batches[max(before - 1, 0) :]
    busy = [b - a for a, b in zip(start.busy_s, end.busy_s, strict=True)]
    samples = recorder.samples
    distances = cohort_distances(recorder)
    whole = whole_cohorts(recorder)
    ages = sorted(sample.age_s for sample in whole)
    lags = sorted(sample.lag for sample in samples)
    return RunFigures(
        arm=arm,
        regime=regime,
        seed=seed,
        batches=len(batches),
        first_batch_s=batches[0].interval_s,
        interval_s=statistics.median(intervals),
        interval_mean_s=statistics.fmean(intervals),
        intervals_s=intervals,
        split_s=mean_split(settled),
        tail_s=statistics.median(batch.tail_s for batch in settled),
        recomputed_tokens=_each(counted, lambda batch: batch.recomputed_tokens),
        prefilled_tokens=_each(counted, lambda batch: batch.prefilled_tokens),
        ks_worst=max((ks for size, ks in distances if size >= COHORT_MIN), default=1.0),
        ks_mean=sum(n * ks for n, ks in distances) / max(sum(n for n, _ in distances), 1),
        fates=len(recorder.fates) / max(len(recorder.cohorts), 1),
        lag_p50=statistics.median(lags),
        lag_max=lags[-1],
        lag_slope=lag_slope(whole),
        age_p50_s=ages[len(ages) // 2],
        age_p99_s=ages[min(len(ages) * 99 // 100, len(ages) - 1)],
        gpu_wait_s=_each(counted, lambda batch: batch.gpu_wait_s),
        busy=statistics.fmean(busy) / (end.at - start.at),
        busy_worst=max(busy) / max(statistics.fmean(busy), 1e-9),
        attempts=recorder.attempts,
        lost=recorder.lost,
        turns=recorder.turns,
    )


def _each(batches: Sequence[Batch], total: Callable[[Batch], float]) -> float:
    """How much a total grew per steady batch; of the only batch, if there is but one."""
    if len(batches) == 1:
        return total(batches[0])
    return (total(batches[-1]) - total(batches[0])) / (len(batches) - 1)


def _nothing(like: Fleet) -> Fleet:
    return Fleet(at=0.0, busy_s=(0.0,) * len(like.busy_s), sampled_tokens=0, prefilled_tokens=0)


def mean_split(batches: Sequence[Batch]) -> dict[str, float]:
    """Seconds per batch by state."""
    names = batches[0].split
    return {name: statistics.fmean(batch.split[name] for batch in batches) for name in names}


def cohort_distances(recorder: Recorder) -> list[tuple[int, float]]:
    """(trajectories dispatched, KS distance) per launch cohort after the first three batches.

    A cohort is what was launched between two cuts. Dispatched: the durations of all its first
    attempts. Trained: those of the attempts that entered a batch, or completed when the groups
    open at the last batch were followed to their end.
    """
    trained: defaultdict[int, list[float]] = defaultdict(list)
    for sample in (*recorder.samples, *recorder.followed):
        trained[recorder.cohorts[sample.group]].append(sample.duration_s)
    return [
        (len(sent), ks_distance(sent, trained[cohort]))
        for cohort, sent in sorted(recorder.dispatched.items())
        if cohort >= COLD_BATCHES
    ]


def whole_cohorts(recorder: Recorder) -> list[Sample]:
    """What was trained of the cohorts before the first that was not trained whole; of all, when
    that is the first. The others' slow groups are not in a batch yet, so their lags and ages are
    those of quick ones."""
    over = ("trained", "filtered")
    late = [c for group, c in recorder.cohorts.items() if recorder.fates.get(group) not in over]
    first = min(late, default=len(recorder.batches))
    found = [s for s in recorder.samples if recorder.cohorts[s.group] < first]
    return found or recorder.samples


def ks_distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Largest difference of two empirical distributions; 1 when one is empty."""
    if not left or not right:
        return 1.0
    a, b = sorted(left), sorted(right)
    return max(abs(bisect_right(a, x) / len(a) - bisect_right(b, x) / len(b)) for x in {*a, *b})


def lag_slope(samples: Sequence[Sample]) -> float:
    """Least-squares slope of lag on duration, batches per 1,000 s; 0 without a spread."""
    x = [sample.duration_s / 1000 for sample in samples]
    y = [float(sample.lag) for sample in samples]
    if len(x) < 2 or min(x) == max(x):
        return 0.0
    return statistics.linear_regression(x, y).slope
