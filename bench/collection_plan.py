"""Which runs bench.collection makes: arms, regimes, seeds, batches.

Owns: the settings of a full and of a quick run. Promise: seeds that judge (201 and on) tuned
nothing. Does not cover: how runs are made (collection_runs.py), what is made of them
(collection_tables.py).
"""

from __future__ import annotations

from muster.types import Value
from sim.rollout import arms
from sim.rollout.figures import SETTLING
from sim.rollout.workload import ENV_BOUND, REGIMES, TB_LIKE, variants

MAIN = ("plain", "strong", "async-strong", "hold-resume", "muster")
SENSITIVE = ("async-strong", "hold-resume", "muster")
"""Arms that are run in every variant; the two that wait for a whole batch are far behind in all."""
SCARCE = ("env-bound 128 boxes", "without boxes")
"""A variant in which boxes are the larger bound, and the lever that is tried there."""
LEVERS = tuple(
    arm.name
    for arm in (
        arms.MACHINE_PLAIN,
        *arms.ALONE,
        arms.ADMISSION_AND_PRIORITY,
        *arms.MINUS,
        *arms.OTHERS,
    )
)
VARIANTS = tuple(
    name for base in REGIMES.values() for name in variants(base) if "context" not in name
)


class Job(Value, frozen=True):
    """One run. `follow`: until every group that was opened has its fate, for the bias."""

    arm: str
    regime: str
    seed: int
    batches: int
    follow: bool


class Plan(Value, frozen=True):
    """What is run. `batches` and `few_batches` are measured, see `cuts`."""

    quick: bool
    seeds: tuple[int, ...]  # of the main table
    batches: int
    few_seeds: tuple[int, ...]  # of levers and sensitivity
    few_batches: int
    levers: tuple[str, ...]
    variants: tuple[str, ...]

    @property
    def regimes(self) -> tuple[str, ...]:
        return tuple(REGIMES)

    def cuts(self, measured: int) -> int:
        """Batches in all: the cold first one of a quick run, else those that settle, go before."""
        return measured + (1 if self.quick else SETTLING)

    def jobs(self) -> tuple[Job, ...]:
        """All of them, seed by seed, so that arms are interleaved."""
        found = [
            Job(arm, regime, seed, self.cuts(self.batches), not self.quick)
            for seed in self.seeds
            for regime in self.regimes
            for arm in MAIN
        ]
        few = self.cuts(self.few_batches)
        apart = [(regime, arm) for regime, arm in self.compared if arm not in MAIN]
        sensitive = [(regime, arm) for regime in self.variants for arm in SENSITIVE]
        for pairs in (apart, sensitive):
            found += [
                Job(arm, regime, s, few, False) for s in self.few_seeds for regime, arm in pairs
            ]
        return tuple(found)

    @property
    def compared(self) -> tuple[tuple[str, str], ...]:
        """(regime, arm) of each row of the lever tables."""
        found = [(regime, arm) for regime in self.regimes for arm in self.levers]
        if SCARCE[0] in self.variants and SCARCE[1] in self.levers:
            found.append(SCARCE)
        return tuple(found)


FULL = Plan(
    quick=False,
    seeds=tuple(range(201, 221)),
    batches=20,
    few_seeds=(201, 202),
    few_batches=5,
    levers=LEVERS,
    variants=VARIANTS,
)
QUICK = Plan(
    quick=True,
    seeds=(101,),
    batches=3,
    few_seeds=(),
    few_batches=0,
    levers=(),
    variants=(),
)
SHORT = {TB_LIKE.name: "tb", ENV_BOUND.name: "env"}
"""Of the regimes, in the names of ratios."""
