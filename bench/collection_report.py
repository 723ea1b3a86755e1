"""docs/results/collection.md out of the results of bench.collection.

Owns: the form of the page. Promise: every figure shown is of the runs named on it; what was not run
is a dash. Does not cover: the plot (collection_plot.py), targets (bench.check).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from bench import check
from bench.collection_plan import MAIN, SCARCE, SENSITIVE
from bench.collection_tables import Ratio, Study, lever_base, pooled, ratios
from sim.rollout.doing import Doing
from sim.rollout.figures import SETTLING

_HEAD = """\
# Time to a trainable batch, simulated

`python -m bench.collection --json collection.json` gives the figures, `--report` this page and its
plot, `python -m bench.check collection.json` judges them. `python -m bench.sim --json -` tells how
fast the simulation is and whether equal seeds give equal traces.

The arms *muster*, *only …*, *without …* and those with another rule are the production machines
(router, ready bank, box pools) under other configurations; *plain*, *strong*, *async-strong* and
*hold-resume* are programs of their own over the same models of engines, boxes, tools and verifiers
(sim/rollout/baselines says what each does). All meet the same tasks, lengths, tool times and
failures on first attempts. Weights are fixed, the trainer takes no time. The quantities of the
workload are those of published traces of coding agents (TraceLab, AgentCgroup, terminal-bench
trials), the engine's constants those of a published fit; docs/SIMULATION.md lists what the models
leave out.
"""
_NOTES = """\
- s/batch: time between batches, the median of all batches of all seeds, and the mean, without the
  first six of each seed: arms that carry work on train short groups first, while the engines fill
  with long ones. first: the cold first batch. *less*: 1 - geometric mean over the seeds of muster's
  median interval over the arm's, with its 95 % interval (t on paired log ratios). The targets mean
  this; `…_pooled` in the figures compares the medians of all batches of all seeds.
- bound: the larger of two true bounds of exactly the groups trained (sim/rollout/bound.py): engine
  work plus the steps that the KV budget enforces, and box time. × bound: mean interval over it. The
  target of 1.10 is of *tb-like*, where KV is what is short. In *env-bound* it is measured and has
  no target: the bound lets every token of KV sample, while a context whose tool runs either keeps
  its KV or is prefilled again, and the bound counts neither. Groups that end in the first batches
  were worked on before them, so a short run of batches can take less than its bound (the rows of
  sensitivity); the main table has the same edge, in 20 batches.
- recomputed: tokens prefilled again that an engine had computed before, per batch, by the engines'
  own count: also for requests that only keep a cache alive, and for preempted ones. GPU wait:
  replica-seconds per batch in which engines idled for environments.
- KS: distance of the durations dispatched and trained, by launch cohort (groups launched between
  two batches, without the first three); the worst cohort of any seed, and the mean. Every group is
  followed to its fate. Half of the boxes that are rebuilt print something else (an assumption), so
  their siblings are launched again.
- lag: batches cut between the launch of a trajectory and its own, median and most. Muster launches
  ahead up to `lag_max` = 16 here, which bounds launches; the product's default is 0. The rows
  *launched at most … ahead* say what a tighter bound of launches costs. Slope (batches of lag per
  1,000 s of an episode's own duration) and age are of the cohorts that were trained whole.
- Levers: each alone stands against the machine without any, that one against plain, which is
  another program, all others against muster; negative is faster. Priority alone is that machine:
  only admission looks at rank.
  They and the sensitivity are run under fewer seeds and batches than the main table. *change*: of
  median intervals. *equal work*: of mean intervals over the bound of exactly what these batches
  trained, so that a seed's mix of short and long groups is not in it; so are the changes in the
  table of sensitivity. Paired over the seeds, with the 95 % interval; one that includes 0, or a
  single seed, is marked "no claim".
- In *env-bound* the asynchronous arms are bound by engines all the same (see busy); in its variant
  with 128 boxes boxes are the larger bound, so the lever of boxes is tried there, too. Sensitivity
  leaves out the two arms that wait for a whole batch.
"""


def rendered(study: Study, machine: dict[str, Any]) -> Iterator[str]:
    """The page, line by line."""
    plan = study.plan
    yield _HEAD
    yield (
        f"Seeds {plan.seeds[0]}–{plan.seeds[-1]}, {plan.batches} batches after {SETTLING} that "
        "settle; "
        f"levers and sensitivity: {len(plan.few_seeds)} seeds, {plan.few_batches} batches. Seeds "
        f"from 201 on tuned nothing. Run on {machine['cpu']}, Python {machine['python']}."
    )
    yield ""
    yield from _targets(study)
    yield ""
    yield from _at_the_bound(study)
    yield ""
    yield "![seconds per batch by what they are spent on](collection.svg)"
    for regime in plan.regimes:
        yield ""
        yield f"## {regime}"
        yield ""
        yield from _arms(study, regime)
        yield ""
        yield from _split(study, regime)
        if plan.levers:
            yield ""
            yield from _levers(study, regime)
    if plan.variants:
        yield ""
        yield "## Sensitivity"
        yield ""
        yield from _sensitivity(study)
        if SCARCE in plan.compared:
            yield ""
            yield f"A lever where boxes are the larger bound, {SCARCE[0]}:"
            yield ""
            yield from _levers(study, SCARCE[0])
    yield ""
    yield _NOTES.rstrip()


def _targets(study: Study) -> Iterator[str]:
    """Each target of bench/targets.toml, and whether it is met."""
    found = ratios(study)
    yield "| target | wanted | found | |"
    yield "|---|---|---|---|"
    for name, bound in check.wanted("collection").items():
        value = found[name]
        low, high = bound.get("min", -math.inf), bound.get("max", math.inf)
        text = f"≥ {low:g}" if "min" in bound else f"≤ {high:g}"
        met = "met" if low <= value <= high else "**missed**"
        yield f"| {name.replace('_', ' ')} | {text} | {value:.3f} | {met} |"


def _at_the_bound(study: Study) -> Iterator[str]:
    """What no policy could do better, with the same groups trained."""
    regime = study.plan.regimes[0]
    over = study.over_bound("muster", regime).value
    told = [f"{1 - study.against(a, regime).value / over:.2f} less than {a}" for a in MAIN[:2]]
    yield (
        f"A collection that took no longer than the bound of what it trains ({regime}) would take "
        f"about {' and '.join(told)}. The targets come from a study in which contexts had no "
        "limit: here an episode ends at 262,144 tokens in all arms, which cuts the giants that the "
        "first two arms wait for. The bound counts no token that is prefilled again, and no KV "
        "that is kept for contexts whose tools run or for what running ones still grow."
    )


def _arms(study: Study, regime: str) -> Iterator[str]:
    yield (
        "| arm | s/batch | mean | first | muster less | × bound | recomputed Mtok | busy | "
        "GPU wait s | KS worst / mean | lag p50 / max | slope | age p99 s | lost | fates |"
    )
    yield f"|{'---|' * 15}"
    for arm in MAIN:
        results = study.main(arm, regime)
        told = [result.figures for result in results]
        less = "" if arm == "muster" else _saving(study.against(arm, regime))
        cells = (
            f"{statistics.median(pooled(results)):,.0f}",
            f"{statistics.fmean(f.interval_mean_s for f in told):,.0f}",
            f"{statistics.median(f.first_batch_s for f in told):,.0f}",
            less,
            f"{study.over_bound(arm, regime).value:.2f}",
            f"{statistics.fmean(f.recomputed_tokens for f in told) / 1e6:.1f}",
            f"{statistics.fmean(f.busy for f in told):.2f}",
            f"{statistics.fmean(f.gpu_wait_s for f in told):,.0f}",
            f"{max(f.ks_worst for f in told):.3f} / "
            f"{statistics.fmean(f.ks_mean for f in told):.3f}",
            f"{statistics.median(f.lag_p50 for f in told):g} / {max(f.lag_max for f in told)}",
            f"{statistics.fmean(f.lag_slope for f in told):.2f}",
            f"{statistics.median(f.age_p99_s for f in told):,.0f}",
            f"{statistics.fmean(f.lost for f in told):.0f}",
            f"{min(f.fates for f in told):.1%}",
        )
        yield f"| {arm} | {' | '.join(cells)} |"


def _split(study: Study, regime: str) -> Iterator[str]:
    states = [str(doing) for doing in Doing]
    yield "Where a batch's seconds go (mean; equal shares among the siblings that still block it):"
    yield ""
    yield f"| arm | {' | '.join(states)} | tail |"
    yield f"|---|{'---|' * (len(states) + 1)}"
    for arm in MAIN:
        told = [result.figures for result in study.main(arm, regime)]
        cells = [f"{statistics.fmean(f.split_s[s] for f in told):,.0f}" for s in states]
        cells.append(f"{statistics.median(f.tail_s for f in told):,.0f}")
        yield f"| {arm} | {' | '.join(cells)} |"


def _levers(study: Study, regime: str) -> Iterator[str]:
    yield "| configuration | s/batch | against | change % | equal work % | lag max | age p99 s |"
    yield "|---|---|---|---|---|---|---|"
    for arm in (arm for its, arm in study.plan.compared if its == regime):
        base = lever_base(arm)
        told = [result.figures for result in study.few(arm, regime)]
        cells = (
            f"{statistics.median(study.few_medians(arm, regime)):,.0f}",
            base,
            _change(study.few_change(arm, base, regime)),
            _change(study.few_work(arm, base, regime)),
            f"{max(f.lag_max for f in told)}",
            f"{statistics.median(f.age_p99_s for f in told):,.0f}",
        )
        yield f"| {arm} | {' | '.join(cells)} |"


def _sensitivity(study: Study) -> Iterator[str]:
    others = [arm for arm in SENSITIVE if arm != "muster"]
    heads = [*SENSITIVE, *(f"muster against {arm} %" for arm in others), "muster × bound"]
    yield f"| workload | {' | '.join(heads)} |"
    yield f"|---|{'---|' * len(heads)}"
    for regime in study.plan.variants:
        cells = [f"{statistics.median(study.few_medians(a, regime)):,.0f}" for a in SENSITIVE]
        cells += [_change(study.few_work("muster", arm, regime)) for arm in others]
        cells.append(f"{statistics.geometric_mean(study.few_over_bound('muster', regime)):.2f}")
        yield f"| {regime} | {' | '.join(cells)} |"


def _saving(ratio: Ratio) -> str:
    share, low, high = ratio.less
    told = f"{share:.1%}"
    return told if math.isnan(low) else f"{told} [{low:.1%}, {high:.1%}]"


def _change(ratio: Ratio) -> str:
    told = f"{100 * (ratio.value - 1):+.1f}"
    if math.isnan(ratio.low):
        return f"{told} (no claim)"
    claim = "" if ratio.low > 1 or ratio.high < 1 else " (no claim)"
    return f"{told} [{100 * (ratio.low - 1):+.1f}, {100 * (ratio.high - 1):+.1f}]{claim}"
