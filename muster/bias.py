"""Is what was trained on like what was dispatched? By launch cohort.

Owns: cohorts, distances, the slope of lag on duration. Promise: pure; a cohort is the groups that
were opened between two batch cuts, and both sides are compared within it, so that a drift of the
policy over the run is no bias. Dispatched are all its trajectories that have ended, trained those
of them that stand in a batch; what is still open is counted beside, for its durations are unknown.
Does not cover: groups that are known by their totals alone.

Gradient weight of a trajectory: |reward − mean of its group| ÷ deviation of its group, times its
sampled tokens (the loss is a token mean). On the dispatched side it is the weight that it would
have had. Duration: first attempt begun to last one ended, seconds. Length: sampled tokens.
KS: the largest distance between the two distribution functions, 0 to 1 (Kolmogorov–Smirnov).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from statistics import fmean

from msgspec.structs import replace

from muster.run_index import RunIndex, lag
from muster.types import Fate, Outcome, Value


class Side(Value, frozen=True):
    """One side of the comparison; means are over its trajectories, pass rate over valid ones."""

    trajectories: int
    valid: int
    duration_mean_s: float | None
    tokens_mean: float | None
    pass_rate: float | None
    duration_mean_weighted_s: float | None  # by gradient weight
    tokens_mean_weighted: float | None


class Cohort(Value, frozen=True):
    """Groups opened after the cut of batch `after_batch` and before the next one."""

    after_batch: int  # 0: before the first cut
    groups: int
    groups_trained: int
    groups_filtered: int
    groups_open: int
    trajectories_open: int  # dispatched, not ended
    dispatched: Side
    trained: Side
    ks_duration: float | None
    ks_tokens: float | None
    ks_duration_weighted: float | None
    ks_tokens_weighted: float | None


class Bias(Value, frozen=True):
    """`settled`: cohorts of which every group has a fate; only they can show a bias for good."""

    cohorts: tuple[Cohort, ...]
    cohorts_settled: int
    ks_duration_max: float | None  # of the settled cohorts
    ks_tokens_max: float | None
    pass_rate_difference: float | None  # trained − dispatched, over the settled cohorts
    lag_slope_per_s: float | None  # versions of lag per second of duration, over what was trained


class _Trajectory(Value, frozen=True):
    group: str
    episode: str
    duration_s: float
    tokens: int
    reward: float | None  # None: not valid
    success: bool
    weight: float = 0.0


def bias(index: RunIndex) -> Bias:
    """Of the whole run."""
    groups = [group for group in index.opened if not index.evaluates(group)]
    ended = _weighted([t for group in groups for t in _ended(index, group)])
    members = {
        episode for step in index.trained for episode in index.member_ids(index.batch(step).members)
    }
    cuts = [(index.batch(s).complete_unix_s, s) for s in sorted(index.steps)]
    cohorts = tuple(_cohorts(index, ended, members, cuts))
    settled = [c for c in cohorts if not c.groups_open]
    return Bias(
        cohorts,
        len(settled),
        max((c.ks_duration for c in settled if c.ks_duration is not None), default=None),
        max((c.ks_tokens for c in settled if c.ks_tokens is not None), default=None),
        _difference(settled),
        _lag_slope(index, [t for t in ended if t.episode in members]),
    )


def _ended(index: RunIndex, group: str) -> Iterable[_Trajectory]:
    for sibling, attempts in index.by_group.get(group, {}).items():
        labelled = index.outcome(group, sibling)
        newest = index.newest_finished(group, sibling)
        if labelled is None or newest is None:
            continue
        ends = [e for a in attempts for e in index.finished.get(f"{group}.{sibling}.{a}", ())[:1]]
        end = index.finished[f"{group}.{sibling}.{newest}"][0].finished_unix_s
        begun = min(e.started_unix_s for e in ends)
        label = labelled.label
        episode = f"{group}.{sibling}.{newest}"
        yield _Trajectory(
            group,
            episode,
            max(0.0, end - begun),
            sum(t.sampled_tokens for t in index.turns.get(episode, ())),
            label.reward if label.outcome.valid else None,
            label.outcome is Outcome.MODEL_SUCCESS,
        )


def _weighted(found: list[_Trajectory]) -> list[_Trajectory]:
    """With gradient weights, which depend on all siblings of a group."""
    weighted = []
    for _, siblings in groupby(found, key=lambda t: t.group):
        group = list(siblings)
        rewards = [t.reward for t in group if t.reward is not None]
        mean = fmean(rewards) if rewards else 0.0
        deviation = math.sqrt(fmean((r - mean) ** 2 for r in rewards)) if rewards else 0.0
        for t in group:
            away = abs(t.reward - mean) if t.reward is not None else 0.0
            weight = away / deviation * t.tokens if deviation else 0.0
            weighted.append(replace(t, weight=weight))
    return weighted


def _cohorts(
    index: RunIndex,
    ended: Sequence[_Trajectory],
    members: set[str],
    cuts: Sequence[tuple[float, int]],
) -> Iterable[Cohort]:
    times = sorted(at for at, _ in cuts)
    steps = [step for _, step in sorted(cuts)]
    groups: dict[int, list[str]] = {}
    for group, opened in index.opened.items():
        if opened[0].evaluates:  # never meant to be trained on
            continue
        groups.setdefault(bisect_left(times, opened[0].opened_unix_s), []).append(group)
    of_group: dict[str, list[_Trajectory]] = {}
    for t in ended:
        of_group.setdefault(t.group, []).append(t)
    for number, names in sorted(groups.items()):
        dispatched = [t for g in names for t in of_group.get(g, ())]
        trained = [t for t in dispatched if t.episode in members]
        fates = [f.fate if (f := index.fate(g)) else None for g in names]
        yield Cohort(
            after_batch=steps[number - 1] if number else 0,
            groups=len(names),
            groups_trained=fates.count(Fate.TRAINED),
            groups_filtered=fates.count(Fate.FILTERED),
            groups_open=fates.count(None),
            trajectories_open=sum(map(index.size, names)) - len(dispatched),
            dispatched=_side(dispatched),
            trained=_side(trained),
            ks_duration=_ks(dispatched, trained, _duration, _one),
            ks_tokens=_ks(dispatched, trained, _tokens, _one),
            ks_duration_weighted=_ks(dispatched, trained, _duration, _weight),
            ks_tokens_weighted=_ks(dispatched, trained, _tokens, _weight),
        )


_Of = Callable[[_Trajectory], float]


def _duration(t: _Trajectory) -> float:
    return t.duration_s


def _tokens(t: _Trajectory) -> float:
    return float(t.tokens)


def _one(t: _Trajectory) -> float:
    return 1.0


def _weight(t: _Trajectory) -> float:
    return t.weight


def _side(found: Sequence[_Trajectory]) -> Side:
    valid = [t for t in found if t.reward is not None]
    total = math.fsum(t.weight for t in found)

    def weighted(values: Iterable[float]) -> float | None:
        pairs = zip(values, found, strict=True)
        return math.fsum(v * t.weight for v, t in pairs) / total if total else None

    return Side(
        len(found),
        len(valid),
        fmean(t.duration_s for t in found) if found else None,
        fmean(t.tokens for t in found) if found else None,
        fmean(t.success for t in valid) if valid else None,
        weighted(t.duration_s for t in found),
        weighted(float(t.tokens) for t in found),
    )


def _ks(
    dispatched: Sequence[_Trajectory], trained: Sequence[_Trajectory], value: _Of, weight: _Of
) -> float | None:
    return ks([(value(t), weight(t)) for t in dispatched], [(value(t), weight(t)) for t in trained])


def ks(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float | None:
    """Distance of two weighted samples of (value, weight); None when one has no weight."""
    totals = math.fsum(w for _, w in one), math.fsum(w for _, w in other)
    if not all(totals):
        return None
    steps = sorted([(v, w / totals[0]) for v, w in one] + [(v, -w / totals[1]) for v, w in other])
    height = widest = 0.0
    for _, together in groupby(steps, key=lambda step: step[0]):
        height += math.fsum(w for _, w in together)
        widest = max(widest, abs(height))
    return min(1.0, widest)


def _difference(settled: Sequence[Cohort]) -> float | None:
    """Pass rate of the trained less that of the dispatched, all settled cohorts together."""
    sides = []
    for of in ([c.trained for c in settled], [c.dispatched for c in settled]):
        valid = sum(side.valid for side in of)
        if not valid:
            return None
        sides.append(math.fsum((side.pass_rate or 0.0) * side.valid for side in of) / valid)
    return sides[0] - sides[1]


def _lag_slope(index: RunIndex, trained: Sequence[_Trajectory]) -> float | None:
    """Least squares; None without two different durations."""
    parents = index.parents()
    base: dict[str, int] = {
        episode: index.base(batch)
        for step in index.trained
        for batch in [index.batch(step)]
        for episode in index.member_ids(batch.members)
    }
    points = []
    for t in trained:
        first = next((s.version for x in index.turns.get(t.episode, ()) for s in x.spans), None)
        behind = None if first is None else lag(parents, first, base[t.episode])
        if behind is not None:
            points.append((t.duration_s, float(behind)))
    return slope(points)


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Of the least-squares line through (x, y); None without two different x."""
    if not points:
        return None
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return None
    return math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread
