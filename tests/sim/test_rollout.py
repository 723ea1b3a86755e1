"""The production machines on the models, beside programs that share nothing with them."""

from __future__ import annotations

import msgspec
import pytest

from sim.rollout import arms
from sim.rollout.arms import Arm
from sim.rollout.baselines import BASELINES
from sim.rollout.muster import World
from sim.rollout.workload import ENV_BOUND, TB_LIKE, Regime

SMALL = msgspec.structs.replace(
    TB_LIKE,
    name="small",
    groups=4,
    group_size=4,
    replicas=2,
    boxes=16,
    kv_tokens=300_000,
    start_failure=0.0,
    hazard_per_s=0.0,
)
TOLERANCE = 0.15


def seconds(world: World) -> float:
    world.run(follow=False)
    return world.bank.batches[-1][0]


def test_machine_without_levers_takes_as_long_as_the_plain_baseline() -> None:
    """Two programs, one behaviour. What is left differs by ties: equal loads go to the lower name
    here and to the fewer sessions there, and a long conversation's turn next to another changes a
    batch by much; so the sum over seeds is compared. Failures are off: a hurt group is run again at
    once there, and replaced by another when it has ended here."""
    mine = theirs = 0.0
    for seed in (101, 102, 103, 104):
        mine += seconds(World(arms.MACHINE_PLAIN, SMALL, seed, 5))
        told = BASELINES["plain"](SMALL, seed, 5, follow=False).run()
        theirs += told.first_batch_s + sum(told.intervals_s)
    assert mine == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.parametrize("regime", [TB_LIKE, ENV_BOUND], ids=lambda regime: regime.name)
def test_all_checks_hold_in_a_full_fleet(regime: Regime) -> None:
    world = World(arms.MUSTER, regime, 104, 2, checks=True)
    world.run()
    assert world.figures().fates == 1.0


@pytest.mark.parametrize("arm", arms.ARMS.values(), ids=lambda arm: arm.name)
def test_all_checks_hold_in_every_arm_on_a_scarce_cache(arm: Arm) -> None:
    scarce = msgspec.structs.replace(
        SMALL, kv_tokens=270_000, start_failure=0.02, hazard_per_s=1 / 50_000
    )
    world = World(arm, scarce, 105, 3, checks=True)
    world.run()
    assert world.figures().fates == 1.0
