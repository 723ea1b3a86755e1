"""What the runs of bench.collection add up to: paired comparisons, figures and ratios by name.

Owns: medians over batches and seeds, confidence intervals, the names that targets.toml knows.
Promise: arms are compared seed by seed, on the same tasks, and over the same number of batches; an
interval without at least two seeds is not told. Does not cover: running, drawing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench._confidence import t95
from bench.collection_plan import MAIN, SENSITIVE, SHORT, Job, Plan
from bench.collection_runs import Results
from muster.types import Value
from sim.rollout import arms
from sim.rollout.run import Result

_ALONE = frozenset(arm.name for arm in (*arms.ALONE, arms.ADMISSION_AND_PRIORITY))


class Ratio(Value, frozen=True):
    """A paired ratio of times: geometric mean over the seeds, with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def less(self) -> tuple[float, float, float]:
        """As a saving: share, and its interval."""
        return 1 - self.value, 1 - self.high, 1 - self.low


def paired(mine: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of values seed by seed: t interval of the mean log ratio."""
    logs = [math.log(a / b) for a, b in zip(mine, theirs, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), math.nan, math.nan)
    half = t95(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


class Study:
    """The results of one plan, by arm."""

    def __init__(self, plan: Plan, results: Results):
        self.plan, self._results = plan, results

    def main(self, arm: str, regime: str) -> list[Result]:
        """Of the main table, seed by seed."""
        plan = self.plan
        jobs = [Job(arm, regime, s, plan.cuts(plan.batches), not plan.quick) for s in plan.seeds]
        return [self._results[job] for job in jobs]

    def few(self, arm: str, regime: str) -> list[Result]:
        """Of the lever and sensitivity tables."""
        plan = self.plan
        jobs = [Job(arm, regime, s, plan.cuts(plan.few_batches), False) for s in plan.few_seeds]
        return [self._results[job] for job in jobs]

    def medians(self, arm: str, regime: str) -> list[float]:
        """Median interval of each seed of the main table, seconds."""
        return [result.figures.interval_s for result in self.main(arm, regime)]

    def few_medians(self, arm: str, regime: str) -> list[float]:
        """The same over the first `few_batches` steady batches of the few seeds."""
        few = self.plan.few_batches
        found = self._few_of(arm, regime)
        return [statistics.median(result.figures.intervals_s[:few]) for result in found]

    def _few_of(self, arm: str, regime: str) -> list[Result]:
        """Of the main table where that has the arm: its runs are longer."""
        if arm not in MAIN or regime not in self.plan.regimes:
            return self.few(arm, regime)
        known = dict(zip(self.plan.seeds, self.main(arm, regime), strict=True))
        return [known[seed] for seed in self.plan.few_seeds]

    def few_over_bound(self, arm: str, regime: str) -> list[float]:
        """The time of the same batches over the bound of exactly what they trained: a seed's mix of
        short and long groups is not in it."""
        few = self.plan.few_batches
        found = []
        for result in self._few_of(arm, regime):
            times, each = result.figures.intervals_s[:few], result.each[:few] or (result.bounds,)
            of_engines = statistics.fmean(bound.b_s for bound in each)
            of_boxes = statistics.fmean(bound.boxes_s for bound in each)
            found.append(statistics.fmean(times) / max(of_engines, of_boxes))
        return found

    def few_change(self, arm: str, base: str, regime: str) -> Ratio:
        """One arm's median interval over another's."""
        return paired(self.few_medians(arm, regime), self.few_medians(base, regime))

    def few_work(self, arm: str, base: str, regime: str) -> Ratio:
        """The same of times over bounds: for equal work."""
        return paired(self.few_over_bound(arm, regime), self.few_over_bound(base, regime))

    def against(self, arm: str, regime: str) -> Ratio:
        """Muster's interval over that arm's, in the main table."""
        return paired(self.medians("muster", regime), self.medians(arm, regime))

    def over_bound(self, arm: str, regime: str) -> Ratio:
        """Mean interval of the steady batches over the KV-aware bound of exactly their groups."""
        found = self.main(arm, regime)
        bound = [result.bounds.true_s for result in found]
        return paired([result.figures.interval_mean_s for result in found], bound)


def pooled(results: Sequence[Result]) -> list[float]:
    """All steady intervals of all seeds, seconds."""
    return [seconds for result in results for seconds in result.figures.intervals_s]


def figures(study: Study) -> dict[str, float]:
    """Flat, the unit in the name."""
    found: dict[str, float] = {}
    for regime in study.plan.regimes:
        for arm in MAIN:
            name = f"{SHORT[regime]}_{arm.replace('-', '_')}"
            results = study.main(arm, regime)
            told = [result.figures for result in results]
            found[f"{name}_interval_p50_s"] = statistics.median(pooled(results))
            found[f"{name}_interval_mean_s"] = statistics.fmean(f.interval_mean_s for f in told)
            found[f"{name}_first_batch_s"] = statistics.median(f.first_batch_s for f in told)
            found[f"{name}_recomputed_mtok"] = statistics.fmean(
                f.recomputed_tokens / 1e6 for f in told
            )
            found[f"{name}_gpu_wait_s"] = statistics.fmean(f.gpu_wait_s for f in told)
            found[f"{name}_busy_share"] = statistics.fmean(f.busy for f in told)
            found[f"{name}_bound_s"] = statistics.fmean(r.bounds.true_s for r in results)
            found[f"{name}_over_bound"] = study.over_bound(arm, regime).value
            found[f"{name}_ks_worst"] = max(f.ks_worst for f in told)
            found[f"{name}_ks_mean"] = statistics.fmean(f.ks_mean for f in told)
            found[f"{name}_prefilled_mtok"] = statistics.fmean(
                f.prefilled_tokens / 1e6 for f in told
            )
            found[f"{name}_tail_s"] = statistics.median(f.tail_s for f in told)
            for state in told[0].split_s:
                found[f"{name}_split_{state}_s"] = statistics.fmean(f.split_s[state] for f in told)
            found[f"{name}_lag_p50"] = statistics.median(f.lag_p50 for f in told)
            found[f"{name}_lag_max"] = max(f.lag_max for f in told)
            found[f"{name}_attempts_lost"] = statistics.fmean(f.lost for f in told)
            found[f"{name}_lag_slope_per_ks"] = statistics.fmean(f.lag_slope for f in told)
            found[f"{name}_age_p99_s"] = statistics.median(f.age_p99_s for f in told)
            found[f"{name}_fates_share"] = min(f.fates for f in told)
    return found


def lever_base(arm: str) -> str:
    """What a configuration of the lever table stands against: the same machine without any lever
    for levers that stand alone, plain for that machine, muster for all others."""
    if arm in _ALONE:
        return arms.MACHINE_PLAIN.name
    return "plain" if arm == arms.MACHINE_PLAIN.name else "muster"


def changes(study: Study) -> dict[str, float]:
    """Every row of the lever and sensitivity tables: ratios of times, flat."""
    found: dict[str, float] = {}
    for regime, arm in study.plan.compared:
        base = lever_base(arm)
        name = f"{_flat(SHORT.get(regime, regime))}_{_flat(arm)}_over_{_flat(base)}"
        found |= _ratio(name, study.few_change(arm, base, regime))
        found |= _ratio(f"{name}_per_work", study.few_work(arm, base, regime))
    for regime in study.plan.variants:
        for arm in SENSITIVE:
            name = f"{_flat(regime)}_{_flat(arm)}"
            found[f"{name}_interval_p50_s"] = statistics.median(study.few_medians(arm, regime))
            if arm != "muster":
                change = study.few_work("muster", arm, regime)
                found |= _ratio(f"{_flat(regime)}_muster_over_{_flat(arm)}_per_work", change)
    return found


def _ratio(name: str, ratio: Ratio) -> dict[str, float]:
    if math.isnan(ratio.low):
        return {name: ratio.value}
    return {name: ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}


def _flat(name: str) -> str:
    kept = "".join(c if c.isalnum() else "_" for c in name.replace("%", "percent"))
    return "_".join(part for part in kept.split("_") if part)


def ratios(study: Study) -> dict[str, float]:
    """Those that targets.toml judges, and what surrounds them."""
    found: dict[str, float] = {}
    for regime in study.plan.regimes:
        short = SHORT[regime]
        mine = statistics.median(pooled(study.main("muster", regime)))
        for arm in MAIN[:-1]:
            name = f"muster_less_than_{arm.replace('-', '_')}_{short}"
            share, low, high = study.against(arm, regime).less
            found[name] = share
            if not math.isnan(low):
                found[f"{name}_low"], found[f"{name}_high"] = low, high
            found[f"{name}_pooled"] = 1 - mine / statistics.median(pooled(study.main(arm, regime)))
        found[f"muster_over_bound_{short}"] = study.over_bound("muster", regime).value
        told = [result.figures for result in study.main("muster", regime)]
        found[f"muster_ks_worst_{short}"] = max(f.ks_worst for f in told)
        found[f"muster_fates_{short}"] = min(f.fates for f in told)
    return found
