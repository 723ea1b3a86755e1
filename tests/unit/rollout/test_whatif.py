"""What if: sane answers on a tiny model, equal to direct simulations."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from sim.rollout import arms
from sim.rollout.costs import EngineCosts
from sim.rollout.figures import Fleet
from sim.rollout.fit_model import Model
from sim.rollout.muster import World
from sim.rollout.whatif import (
    Question,
    Result,
    Setup,
    WhatIf,
    answer,
    mean_batch_tokens,
    setups,
    simulate,
    time_to_batch,
)
from sim.rollout.workload import TB_LIKE, Spread

TINY = replace(
    TB_LIKE,
    name="tiny",
    groups=2,
    group_size=2,
    turns=Spread(4, 0.3),
    turns_max=8,
    observation=Spread(300, 0.3),
    tool=Spread(0.5, 0.5),
    verify=Spread(2, 0.3),
    cold=Spread(4, 0.2),
    boxes=4,
    replicas=2,
    context_limit=60_000,
    kv_tokens=80_000,
    start_failure=0.0,
)
MODEL = Model("run-1", TINY, EngineCosts(0.02, 0.1, 0.001, 0.05, 0.01, 1e-7), 60.0, {})


@cache
def batch_s(replicas: int = 2) -> float:
    question = Question(batches=6, replicas=replicas)
    return simulate(MODEL, setups(MODEL, question)[0]).batch_s


def test_the_answer_is_that_of_a_direct_simulation() -> None:
    question = Question(batches=3, seeds=2)
    asked = setups(MODEL, question)
    found = answer(MODEL, question, asked, [simulate(MODEL, setup) for setup in asked])
    direct = []
    for seed in (1, 2):
        world = World(arms.MUSTER, TINY, seed, 3, costs=MODEL.engine)
        world.run(follow=False)
        direct.append(time_to_batch(world))
    assert found.base.batch_s == pytest.approx(sum(direct) / 2)  # a median of two


@pytest.mark.parametrize(("cuts", "begun"), [(3, 0), (12, 5)], ids=("short", "settled"))
def test_the_time_to_batch_is_that_of_a_mean_batch_at_the_rate_of_tokens(
    cuts: int, begun: int
) -> None:
    """Not of the batches that happened to be cut, nor of those while the mix of work settles."""
    world = World(arms.MUSTER, TINY, 1, cuts, costs=MODEL.engine)
    tokens = mean_batch_tokens(world.workload, TINY)
    slow, fast = 100.0, 40.0  # seconds for a mean batch's tokens, up to the cut `begun` and after
    for cut in range(cuts):
        after = max(cut - begun, 0)
        at = slow * (min(cut, begun) + 1) + 7 * fast * after
        world.fleets.append(
            Fleet(at, (0.0, 0.0), int(tokens * (min(cut, begun) + 1 + 7 * after)), 0)
        )
    assert time_to_batch(world) == pytest.approx(fast, rel=0.01)


def test_a_mean_batch_is_of_all_groups_and_siblings() -> None:
    twice = replace(TINY, groups=4)
    plans = World(arms.MUSTER, TINY, 1, 1).workload
    assert mean_batch_tokens(plans, twice) == pytest.approx(2 * mean_batch_tokens(plans, TINY))
    one = [plans.plan(group, sibling, 0) for group in range(500) for sibling in (0, 1)]
    mean = sum(plan.sampled_tokens for plan in one) / len(one)
    assert mean_batch_tokens(plans, TINY) == pytest.approx(TINY.trajectories * mean)


def test_a_run_that_did_not_settle_says_so() -> None:
    short, settled = (told(Question(batches=n), [1.0] * 4).notes for n in (10, 11))
    assert len(short) == 1
    assert "--batches 11" in short[0]
    assert not settled


def test_the_router_predicts_by_the_costs_of_its_engines() -> None:
    rules = World(arms.MUSTER, TINY, 1, 3, costs=MODEL.engine).router.machine.rules
    told = {name: getattr(rules, name) for name in EngineCosts.__struct_fields__}
    assert EngineCosts(**told) == MODEL.engine


def test_engines_wait_for_no_more_than_all_of_their_time() -> None:
    found = simulate(MODEL, setups(MODEL, Question(batches=3))[0])
    assert 0 < found.gpu_wait_share <= 1


def test_twice_the_replicas_are_not_slower() -> None:
    assert batch_s(replicas=4) <= batch_s()


def test_a_slower_engine_takes_longer() -> None:
    slower = replace(MODEL, engine=EngineCosts(0.04, 0.2, 0.002, 0.1, 0.02, 2e-7))
    setup = setups(slower, Question(batches=6))[0]
    assert simulate(slower, setup).batch_s > batch_s()


def test_cold_boxes_are_not_faster() -> None:
    cold = setups(MODEL, Question(batches=6, warm=False))[0]
    assert simulate(MODEL, cold).batch_s >= batch_s()


def test_one_change_at_a_time_is_tried_under_each_seed() -> None:
    asked = setups(MODEL, Question(replicas=3, warm=False, seeds=2, batches=3))
    assert [(s.name, s.seed) for s in asked][:4] == [
        ("as asked", 1),
        ("as asked", 2),
        ("one more replica", 1),
        ("one more replica", 2),
    ]
    base = asked[0].regime
    changed = {s.name: (s.regime, s.warm) for s in asked if s.seed == 1}
    assert changed["one more replica"][0] == replace(base, replicas=4)
    assert changed["one more box"][0] == replace(base, boxes=5)
    assert changed["a tenth more KV"][0] == replace(base, kv_tokens=88_000)
    assert changed["warm boxes"] == (base, True)


def test_what_was_not_asked_for_is_as_recorded() -> None:
    asked = setups(MODEL, Question(boxes=9))[0]
    assert asked.regime == replace(TINY, boxes=9)
    assert asked.batches == 11  # tiny batches: as many as are ever measured


def result(batch: float) -> Result:
    return Result(batch, 2 * batch, 10.0, 0.25, 0.5, {"tool": batch})


def told(question: Question, times: list[float]) -> WhatIf:
    asked: list[Setup] = setups(MODEL, question)
    return answer(MODEL, question, asked, [result(t) for t in times])


def test_costs_are_prices_times_the_time_to_batch() -> None:
    question = Question(gpu_hour_price=3.0, box_hour_price=0.5)
    base = told(question, [1800.0] * 4).base
    assert base.price_hour == 2 * 3.0 + 4 * 0.5
    assert base.cost_per_batch == pytest.approx(8.0 * 1800 / 3600)
    assert (base.gpu_wait_share, base.gpu_wait_s) == (0.25, 10.0)


def test_what_saves_most_for_its_price_stands_first() -> None:
    question = Question(gpu_hour_price=4.0, box_hour_price=0.1)
    changes = told(question, [100.0, 80.0, 99.0, 60.0]).changes
    assert [(c.fleet.name, c.saves_s) for c in changes] == [
        ("one more box", 1.0),  # 10 s for each 1 an hour
        ("one more replica", 20.0),  # 5 s
        ("a tenth more KV", 40.0),  # has no price
    ]
    assert [c.worth for c in changes] == [pytest.approx(10.0), pytest.approx(5.0), None]


def test_without_prices_what_saves_most_time_stands_first() -> None:
    changes = told(Question(), [100.0, 80.0, 99.0, 60.0]).changes
    assert [c.saves_s for c in changes] == [40.0, 20.0, 1.0]
