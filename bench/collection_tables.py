"""What the runs of bench.collection add up to: paired comparisons, figures and ratios by name.

Owns: medians over batches and seeds, confidence intervals, the names that targets.toml knows.
Promise: arms are compared seed by seed, on the same tasks, and over the same number of batches; an
interval without at least two seeds is not told. Does not cover: running, drawing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench.collection_plan import MAIN, SHORT, Job, Plan
from bench.collection_runs import Results
from muster.types import Value
from sim.rollout import arms
from sim.rollout.run import Result

_FROM_NOTHING = frozenset(
    arm.name for arm in (arms.MACHINE_PLAIN, *arms.ALONE, arms.ADMISSION_AND_PRIORITY)
)
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Two-sided 95 % points of Student's t for 1 … 30 degrees of freedom."""


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
    degrees = len(logs) - 1
    t = _T95[degrees - 1] if degrees <= len(_T95) else 1.96
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
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
        if arm in MAIN and regime in self.plan.regimes:
            few = self.plan.few_batches
            known = dict(zip(self.plan.seeds, self.main(arm, regime), strict=True))
            return [
                statistics.median(known[seed].figures.intervals_s[:few])
                for seed in self.plan.few_seeds
            ]
        return [result.figures.interval_s for result in self.few(arm, regime)]

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
    """What a configuration of the lever table stands against: plain for levers that stand alone
    (and for the machine that has none), muster for all others."""
    return "plain" if arm in _FROM_NOTHING else "muster"


def changes(study: Study) -> dict[str, float]:
    """Every row of the lever and sensitivity tables: ratios of times, flat."""
    found: dict[str, float] = {}
    for regime in study.plan.regimes:
        for arm in study.plan.levers:
            change = paired(
                study.few_medians(arm, regime), study.few_medians(lever_base(arm), regime)
            )
            name = f"{SHORT[regime]}_{_flat(arm)}_over_{lever_base(arm)}"
            found[name] = change.value
            if not math.isnan(change.low):
                found[f"{name}_low"], found[f"{name}_high"] = change.low, change.high
    for regime in study.plan.variants:
        for arm in MAIN:
            name = f"{_flat(regime)}_{_flat(arm)}_interval_p50_s"
            found[name] = statistics.median(study.few_medians(arm, regime))
    return found


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
