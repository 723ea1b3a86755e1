"""Engines that wait on environments, as every arm tells it: one replica, two siblings a group."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.rollout.arms import ARMS
from sim.rollout.baselines import BASELINES
from sim.rollout.measure import Recorder
from sim.rollout.muster import World
from sim.rollout.workload import TB_LIKE, Plan, Regime, Turn, Workload
from tests.unit.rollout.test_actors import PLAN

ONE = replace(
    TB_LIKE,
    name="one",
    groups=1,
    group_size=2,
    boxes=4,
    replicas=1,
    hazard_per_s=0.0,
    start_failure=0.0,
)
LAST = Turn(0, 20, 0.0)
EVERY_ARM = pytest.mark.parametrize("arm", [*BASELINES, "muster", "machine, no lever"])
BARRIER = pytest.mark.parametrize("arm", ["plain", "strong", "machine, no lever"])


def told(arm: str, regime: Regime, plans: tuple[Plan, Plan]) -> Recorder:
    """The first batch of an arm, in which each sibling has a plan of its own."""

    class Given(Workload):
        def plan(self, group: int, sibling: int, attempt: int) -> Plan:
            return plans[sibling]

    if arm in BASELINES:
        made: Any = BASELINES[arm](regime, 101, 1, follow=False)
        made.workload = Given(regime, 101)
        made.run()
        return made.recorder  # type: ignore[no-any-return]
    world = World(ARMS[arm], regime, 101, 1)
    world.router.workload = Given(regime, 101)
    world.run(follow=False)
    return world.recorder


def acting(tool_s: float, *, sampled: int = 50) -> Plan:
    """One long step and a verifier of 5 s; the box starts in 30 s where it starts cold."""
    turns = (Turn(100, sampled, tool_s), LAST)
    return PLAN._replace(turns=turns, tokens=3_120 + sampled, alone_s=tool_s + 10.0)


@EVERY_ARM
def test_an_engine_waits_while_all_its_episodes_are_in_boxes(arm: str) -> None:
    (batch,) = told(arm, ONE, (acting(200.0), acting(200.0))).batches
    assert 200.0 < batch.gpu_wait_s < batch.at


@BARRIER
def test_it_waits_for_the_start_of_boxes_and_for_verifiers_too(arm: str) -> None:
    (batch,) = told(arm, ONE, (acting(200.0), acting(200.0))).batches
    assert batch.gpu_wait_s == pytest.approx(30.0 + 200.0 + 5.0, rel=0.01)


@BARRIER
def test_an_engine_that_samples_at_its_peak_waits_for_nobody(arm: str) -> None:
    """A cache for one conversation of the workload: one sibling samples for three minutes, so the
    engine could not do more while the other one is at its tool for 100 s."""
    alone = replace(ONE, system_tokens=45_000, context_limit=60_000, kv_tokens=61_000)
    (batch,) = told(arm, alone, (acting(0.0, sampled=10_000), acting(100.0))).batches
    assert batch.at > 200.0
    # Boxes start in 30 s; half of a verifier's 5 s; the other's is the last: 5 s.
    assert batch.gpu_wait_s == pytest.approx(30.0 + 2.5 + 5.0, abs=2.5)
