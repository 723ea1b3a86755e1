"""Routing by simulation: mean group finish of Muster's against that of six published policies.

    python -m bench.routing [--quick] [--seeds 204-223] [--jobs N] [--json PATH|-] [--report]

Owns: which seeds, the comparison, its confidence. Promise: paired: every policy meets the same
groups, seed by seed; a ratio is the mean over seeds of the best other policy's mean, over ours,
with a 95 % interval over seeds; the best other is chosen per case by its mean, not per seed. Single
runs are kept under the cache folder by a digest of the code that they ran, so that an interrupted
comparison goes on. Does not cover: the simulation (sim/rollout/routing.py).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bench._confidence import t95
from bench._results import machine, parser, publish
from bench._routing_page import PAGE, written
from bench._routing_runs import Task, results
from sim.rollout.routing import ALONE, CASES, NAMES, OTHERS, OURS, Figures

GROUPS, GROUPS_QUICK = 32, 8
SEEDS, SEEDS_QUICK = "204-223", "101-102"


def ratios(found: Sequence[Figures]) -> tuple[dict[str, float], dict[str, float]]:
    """(figures, ratios) of all cases; flat names, units in them."""
    figures: dict[str, float] = {}
    told: dict[str, float] = {}
    for case in CASES:
        by_arm = {name: _of(found, case.name, name) for name in NAMES}
        for name, runs in by_arm.items():
            figures |= _figures(case.name, name, runs)
        means = {name: fmean(f.group_finish_s for f in by_arm[name]) for name in OTHERS}
        best = min(means, key=lambda name: (means[name], name))
        for name in (OURS, ALONE):
            low, mean, high = interval(by_arm[best], by_arm[name])
            told[f"{case.name}_best_other_over_{name}"] = mean
            if not math.isnan(low):
                told[f"{case.name}_best_other_over_{name}_low"] = low
                told[f"{case.name}_best_other_over_{name}_high"] = high
        figures[f"{case.name}_best_other_{best}"] = means[best]
    return figures, told


def _of(found: Sequence[Figures], case: str, name: str) -> list[Figures]:
    return sorted((f for f in found if (f.case, f.arm) == (case, name)), key=lambda f: f.seed)


def _figures(case: str, name: str, runs: Sequence[Figures]) -> dict[str, float]:
    return {
        f"{case}_{name}_group_finish_s": fmean(f.group_finish_s for f in runs),
        f"{case}_{name}_recomputed_mtok": fmean(f.recomputed_tokens for f in runs) / 1e6,
        f"{case}_{name}_busy_max_over_mean": fmean(f.busy for f in runs),
        f"{case}_{name}_migrations": fmean(f.migrations for f in runs),
    }


def interval(others: Sequence[Figures], ours: Sequence[Figures]) -> tuple[float, float, float]:
    """Ratio of means, with its 95 % interval from the paired residuals (delta method); of one seed
    there is none: nan."""
    a = [f.group_finish_s for f in others]
    b = [f.group_finish_s for f in ours]
    n, mean_a, mean_b = len(a), fmean(a), fmean(b)
    ratio = mean_a / mean_b
    if n < 2:
        return math.nan, ratio, math.nan
    residuals = [x - ratio * y for x, y in zip(a, b, strict=True)]
    deviation = (sum(r * r for r in residuals) / (n - 1)) ** 0.5 / mean_b
    half = t95(n - 1) * deviation / n**0.5
    return ratio - half, ratio, ratio + half


def seeds_of(text: str) -> list[int]:
    """204-223, or 204,205."""
    if "-" in text:
        first, last = text.split("-")
        return list(range(int(first), int(last) + 1))
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--seeds", help=f"default {SEEDS}, quick {SEEDS_QUICK}")
    made.add_argument("--groups", type=int, help=f"default {GROUPS}, quick {GROUPS_QUICK}")
    made.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    made.add_argument("--report", action="store_true", help="write the page's table, too")
    return made.parse_args()


def main() -> None:
    asked = arguments()
    seeds = seeds_of(asked.seeds or (SEEDS_QUICK if asked.quick else SEEDS))
    groups = asked.groups or (GROUPS_QUICK if asked.quick else GROUPS)
    tasks = [Task(name, case, seed, groups) for seed in seeds for case in CASES for name in NAMES]
    before = machine()
    found = results(tasks, asked.jobs, lambda line: print(line, file=sys.stderr, flush=True))
    figures, told = ratios(found)
    settings: dict[str, Any] = {
        "quick": asked.quick,
        "seeds": f"{seeds[0]}-{seeds[-1]}",
        "groups": groups,
        "runs": len(tasks),
    }
    result = {
        "name": "routing",
        "machine": before,
        "settings": settings,
        "figures": figures,
        "ratios": told,
    }
    publish(result, asked.json)
    if asked.report:
        PAGE.write_text(written(PAGE.read_text("utf-8"), result), "utf-8")


if __name__ == "__main__":
    main()
