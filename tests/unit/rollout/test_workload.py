"""The simulated workload: its medians and spreads, what siblings share, who can disturb whom."""

from __future__ import annotations

import math
import statistics
from functools import lru_cache

import pytest

from sim.rollout.workload import ENV_BOUND, TB_LIKE, Plan, Regime, Spread, Workload, variants

REGIMES = pytest.mark.parametrize("regime", [TB_LIKE, ENV_BOUND], ids=lambda r: r.name)


@lru_cache(maxsize=4)
def plans(regime: Regime, groups: int = 1000, siblings: int = 2) -> tuple[Plan, ...]:
    workload = Workload(regime, 7)
    return tuple(workload.plan(g, s, 0) for g in range(groups) for s in range(siblings))


def ranks(values: list[float]) -> list[float]:
    """Average ranks, as a rank correlation wants them."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last < len(order) and values[order[last]] == values[order[first]]:
            last += 1
        for place in range(first, last):
            found[order[place]] = (first + last - 1) / 2
        first = last
    return found


@REGIMES
def test_medians_are_those_of_the_table(regime: Regime) -> None:
    seen = plans(regime)
    turns = [plan.turns[0] for plan in seen if len(plan.turns) > 1]
    turns_median = statistics.median(len(plan.turns) for plan in seen)
    assert turns_median == pytest.approx(regime.turns.median, rel=0.12)
    for values, spread in (
        ([t.observation_tokens for t in turns], regime.observation),
        ([t.sampled_tokens for t in turns], regime.sampled),
        ([t.tool_s for t in turns], regime.tool),
        ([p.box_start_s for p in seen], regime.cold),
        ([p.verify_s for p in seen if p.verify_s], regime.verify),
    ):
        within = 0.06 * (1 + spread.sigma)
        assert statistics.median(values) == pytest.approx(spread.median, rel=within)


def test_the_spread_is_sigma_and_half_of_its_square_is_between_tasks() -> None:
    regime = TB_LIKE.with_context(10**9)
    values = [[_logs(plan) for plan in pair] for pair in _acting(_pairs(plans(regime)))]
    for index, sigma in enumerate((0.8, 0.8, 2.87)):
        pairs = [(a[index], b[index]) for a, b in values]
        left, right = zip(*pairs, strict=True)
        assert statistics.stdev(left + right) == pytest.approx(sigma, rel=0.1)
        assert statistics.correlation(left, right) == pytest.approx(0.5, abs=0.1)


def _pairs(found: tuple[Plan, ...]) -> list[tuple[Plan, Plan]]:
    return list(zip(found[::2], found[1::2], strict=True))


def _acting(pairs: list[tuple[Plan, Plan]]) -> list[tuple[Plan, Plan]]:
    """Those whose first turn is not the last of either."""
    return [pair for pair in pairs if min(len(plan.turns) for plan in pair) > 1]


def _logs(plan: Plan) -> tuple[float, float, float]:
    """Logs of the first turn's quantities; a tool time at its cap is moved to where it may be."""
    turn = plan.turns[0]
    tool = min(turn.tool_s, 299.0)
    return math.log(turn.observation_tokens), math.log(turn.sampled_tokens), math.log(tool)


@REGIMES
def test_caps_hold_and_are_reached(regime: Regime) -> None:
    seen = plans(regime)
    assert max(len(plan.turns) for plan in seen) == regime.turns_max
    assert max(turn.tool_s for plan in seen for turn in plan.turns) == regime.step_limit_s
    assert min(t.sampled_tokens for plan in seen for t in plan.turns) >= 1


@REGIMES
def test_the_last_turn_says_that_it_is_done_and_runs_no_tool(regime: Regime) -> None:
    ends = [plan.turns[-1] for plan in plans(regime) if not plan.context_full]
    assert {(turn.observation_tokens, turn.tool_s) for turn in ends} == {(0, 0.0)}


def test_a_full_context_ends_the_episode_as_a_failure_of_the_model() -> None:
    regime = TB_LIKE.with_context(20_000)
    full = [plan for plan in plans(regime) if plan.context_full]
    assert len(full) > 100
    for plan in full:
        used = sum(t.sampled_tokens + t.observation_tokens for t in plan.turns)
        assert regime.prompt_tokens + used == plan.tokens == 20_000
        assert (plan.reward, plan.verify_s) == (0.0, 0.0)
    others = [plan for plan in plans(regime) if not plan.context_full]
    assert max(plan.tokens for plan in others) < 20_000


def test_a_context_limit_changes_nothing_of_the_episodes_that_stay_below() -> None:
    for free, bound in zip(plans(TB_LIKE), plans(TB_LIKE.with_context(100_000)), strict=True):
        if not bound.context_full:
            assert bound == free


@REGIMES
def test_longer_episodes_pass_less(regime: Regime) -> None:
    seen = plans(regime, groups=2000, siblings=2)
    lengths = ranks([float(len(plan.turns)) for plan in seen])
    rewards = ranks([plan.reward for plan in seen])
    assert statistics.correlation(lengths, rewards) == pytest.approx(-0.3, abs=0.04)
    assert statistics.fmean(plan.reward for plan in seen) == pytest.approx(0.3, abs=0.03)


def test_infrastructure_takes_one_start_in_a_hundred_and_one_mean_episode_in_a_hundred() -> None:
    workload = Workload(ENV_BOUND, 3)
    seen = [workload.plan(group, 0, 0) for group in range(4000)]
    assert statistics.fmean(plan.start_fails for plan in seen) == pytest.approx(0.01, abs=0.005)
    mean_s = statistics.fmean(plan.alone_s for plan in seen)
    life_s = statistics.fmean(plan.box_life_s for plan in seen)
    assert mean_s / life_s == pytest.approx(0.01, rel=0.15)


def test_a_plan_does_not_depend_on_what_was_asked_before() -> None:
    one, other = Workload(TB_LIKE, 5), Workload(TB_LIKE, 5)
    keys = [(g, s, a) for g in range(4) for s in range(3) for a in range(2)]
    forth = {key: one.plan(*key) for key in keys}
    back = {key: other.plan(*key) for key in reversed(keys)}
    assert forth == back
    assert len({plan.alone_s for plan in forth.values()}) == len(keys)
    assert Workload(TB_LIKE, 6).plan(0, 0, 0) != forth[0, 0, 0]


def test_variants_change_what_they_name() -> None:
    found = variants(TB_LIKE)
    assert found["tb-like kv x0.5"].kv_tokens == 300_000
    assert (found["tb-like groups of 16"].groups, found["tb-like groups of 4"].groups) == (16, 64)
    assert {v.trajectories for v in found.values()} == {256}
    assert found["tb-like tool sigma 3.4"].tool == Spread(0.3, 3.4)
