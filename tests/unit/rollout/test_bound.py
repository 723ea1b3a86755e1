"""The lower bounds, on one trajectory that was worked out by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sim.rollout.bound import Demand, bounds, bounds_of, demand, peak_rate
from sim.rollout.costs import EngineCosts
from sim.rollout.measure import Sample
from sim.rollout.workload import TB_LIKE, Plan, Spread, Turn, Workload

COSTS = EngineCosts(0.5, 1.0, 0.0, 0.1, 0.01, 1e-6)
REGIME = replace(
    TB_LIKE, system_tokens=1000, group_tokens=500, replicas=1, kv_tokens=10_000, boxes=10
)
PLAN = Plan(
    turns=(Turn(1000, 100, 10.0), Turn(300, 200, 20.0)),
    prompt_tokens=1500,
    box_start_s=20.0,
    start_fails=False,
    box_life_s=1e9,
    verify_s=5.0,
    reward=1.0,
    context_full=False,
    tokens=3100,
    alone_s=40.0,
)


def test_the_demand_of_a_trajectory() -> None:
    found = demand(PLAN, REGIME, COSTS, first=True)
    # Prefill: 0.5 + 0.5 for the group's prompt, 0.5 + 1.0 for the observation of turn 1.
    assert found.prefill_s == pytest.approx(2.5)
    # The first token of a turn comes with its prefill. Turn 1: 99 steps at 1,550 tokens on average;
    # turn 2: 199 steps at 2,600 + 100.
    assert found.decode_s == pytest.approx(0.99 + 0.15345 + 1.99 + 0.5373)
    assert found.decode_context == pytest.approx(99 * 50 + 199 * 1200)
    # During the tools its own context is 100, then 1,300 tokens.
    assert found.tool_context == pytest.approx(10 * 100 + 20 * 1300)
    assert (found.box_s, found.decode_steps) == (40.0, 298)
    later = demand(PLAN, REGIME, COSTS, first=False)
    assert found.prefill_s - later.prefill_s == pytest.approx(0.5)  # the prompt is cached


def test_the_bounds_of_that_demand() -> None:
    found = bounds_of(demand(PLAN, REGIME, COSTS, first=True), REGIME, COSTS, 1)
    assert found.a_s == pytest.approx(2.5 + 3.67075)
    assert found.b_s == pytest.approx(6.17075 + 0.1 * 243_750 / 10_000)
    assert found.boxes_s == pytest.approx(4.0)
    # C: w = 27,000 / 10,000 / 9.5667 = 0.2822, 6.1708 + 2.4375 / 0.7178 = 9.5667.
    assert found.c_s == pytest.approx(9.5667, abs=1e-4)
    assert found.true_s == found.b_s


def test_boxes_bound_where_tools_are_slow_and_batches_and_replicas_share() -> None:
    total = Demand(prefill_s=80.0, box_s=4000.0)
    found = bounds_of(total, replace(REGIME, replicas=4), COSTS, 2)
    assert (found.a_s, found.boxes_s, found.true_s) == (10.0, 200.0, 200.0)


def test_bounds_come_from_exactly_the_attempts_that_were_trained() -> None:
    workload = Workload(TB_LIKE, 11)
    samples = [Sample(3, s, s % 2, 0.0, 0.0, 0) for s in range(4)]
    expected = Demand()
    for number, sample in enumerate(samples):
        plan = workload.plan(sample.group, sample.sibling, sample.attempt)
        expected += demand(plan, TB_LIKE, COSTS, first=number == 0)
    assert bounds(samples, workload, COSTS, 2) == bounds_of(expected, TB_LIKE, COSTS, 2)


def test_the_peak_is_a_replica_full_of_the_contexts_of_the_workload() -> None:
    # Without spread: one turn of 1,000 tokens after 3,000: contexts of 3,500; 10 of them fit.
    regime = replace(TB_LIKE, turns=Spread(1, 0), sampled=Spread(1000, 0), kv_tokens=35_000)
    step_s = 0.1 + 0.01 * 10 + 1e-6 * 35_000
    assert peak_rate(regime, COSTS) == pytest.approx(10 / step_s)
