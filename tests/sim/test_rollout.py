"""The production machines on the models, beside programs that share nothing with them."""

from __future__ import annotations

import msgspec
import pytest

from sim.rollout import arms
from sim.rollout.arms import Arm
from sim.rollout.baselines.barrier import Plain
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
TOLERANCE = 0.001  # what the calls between the services take in the machine's world


def seconds(world: World) -> float:
    world.run(follow=False)
    return world.bank.batches[-1][0]


@pytest.mark.parametrize("seed", [101, 102, 103, 104])
def test_machine_without_levers_takes_as_long_as_the_plain_baseline(seed: int) -> None:
    """Two programs, one behaviour. Failures are off: a hurt group is run again at once there, and
    replaced by another when it has ended here."""
    told = Plain(SMALL, seed, 5, follow=False).run()
    mine = seconds(World(arms.MACHINE_PLAIN, SMALL, seed, 5))
    assert mine == pytest.approx(told.first_batch_s + sum(told.intervals_s), rel=TOLERANCE)


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
