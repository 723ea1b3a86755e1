"""Engine constants under load: known ones come out again, and a real engine's turns make sense."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from muster.entries import Turn
from muster.types import EpisodeKey, EpisodeState, StateInterval
from sim.rollout.costs import EngineCosts
from sim.rollout.fit_engine import EngineFit, fit_engine, seconds
from sim.rollout.least import least
from sim.rollout.workload import TB_LIKE, Regime, Spread
from tests.unit.rollout.recorded import Played, _Episode

SLOW = EngineCosts(0.03, 2.4, 0.15, 0.035, 0.002, 1e-5)  # about those of a small model on one core
CROWDED = replace(
    TB_LIKE,
    groups=4,
    group_size=8,
    system_tokens=170,
    group_tokens=66,
    turns=Spread(12, 0.9),
    observation=Spread(44, 0.8),
    sampled=Spread(11, 0.8),
    tool=Spread(0.1, 1.5),
    cold=Spread(1.0, 0.3),
    context_limit=4_000,
    kv_tokens=12_000,  # contexts are thrown out of the cache: prefills of all lengths
    hazard_per_s=0.0,
    start_failure=0.0,
)
ROOMY = replace(CROWDED, kv_tokens=400_000, groups=2)  # nothing is: hardly one long prefill


class Shaken(Played):
    """The engine's speed changes with each request, as on cores that it shares."""

    def __init__(self, regime: Regime, costs: EngineCosts, seed: int):
        super().__init__(regime, costs, seed)
        self._draw = Random(5)

    def _ask(self, episode: _Episode) -> None:
        self._engine.speed = math.exp(self._draw.gauss(0.0, 0.2))
        super()._ask(episode)


@cache
def fitted(noise: bool, crowded: bool = True) -> EngineFit:
    engine = Shaken if noise else Played
    played = engine(CROWDED if crowded else ROOMY, SLOW, seed=3)
    return fit_engine(played.record().turns, EngineCosts())


@pytest.mark.parametrize("uncached", [30, 100, 300, 1_000, 3_000])
@pytest.mark.parametrize(("noise", "within"), [(False, 0.02), (True, 0.2)])
def test_prefills_of_a_crowded_engine_cost_what_they_cost(
    noise: bool, within: float, uncached: int
) -> None:
    found = fitted(noise).costs.prefill_s(uncached)
    assert found == pytest.approx(SLOW.prefill_s(uncached), rel=within)


@pytest.mark.parametrize("running", [2, 4, 12])
@pytest.mark.parametrize(("noise", "within"), [(False, 0.03), (True, 0.25)])
def test_steps_of_a_crowded_engine_cost_what_they_cost(
    noise: bool, within: float, running: int
) -> None:
    found = fitted(noise).costs.step_s(running, running * 900)
    assert found == pytest.approx(SLOW.step_s(running, running * 900), rel=within)


def test_a_few_long_prefills_do_not_carry_a_curvature() -> None:
    few, many = fitted(noise=True, crowded=False), fitted(noise=True)
    assert (few.curved, few.costs.prefill_square_s) == (False, 0.0)
    assert many.curved


def test_without_curvature_long_prefills_are_foretold_in_proportion() -> None:
    costs = fitted(noise=True, crowded=False).costs
    assert costs.prefill_s(3_000) == pytest.approx(SLOW.prefill_s(3_000), rel=0.35)


def test_half_of_the_time_is_not_bought_with_the_fastest_turns() -> None:
    fit = fitted(noise=True)
    told = sum(seconds(fit.costs, factors) for factors, _ in (*fit.prefill, *fit.step))
    took = sum(recorded for _, recorded in (*fit.prefill, *fit.step))
    assert told / took == pytest.approx(1.0, abs=0.05)


# -- an engine on one core that it shares ----------------------------------------------------


@cache
def loaded() -> tuple[Turn, ...]:
    """Two minutes of one engine of two, with all else on the same cores: long prefills are five."""
    rows = Path(__file__).with_name("loaded_engine.csv").read_text("utf-8").splitlines()[1:]
    return tuple(_turn(number, *map(float, row.split(","))) for number, row in enumerate(rows))


def _turn(number: int, begun: float, filled: float, done: float, *tokens: float) -> Turn:
    prompt, cached, sampled = map(int, tokens)
    key = EpisodeKey("r", "g", number, 0, 1)
    spans = (
        StateInterval(EpisodeState.PREFILL, begun, filled),
        StateInterval(EpisodeState.DECODE, filled, done),
    )
    return Turn(f"{number}-0", key, 0, 0, prompt, sampled, cached, (), "one", spans)


def test_long_prefills_of_a_loaded_engine_are_not_blown_up() -> None:
    """It was 40 to 700 s by turns that had the engine to themselves, which are short ones."""
    costs = fit_engine(loaded(), EngineCosts(), 4_096).costs
    assert 5 < costs.prefill_s(3_000) < 11
    assert 0.04 < costs.prefill_s(30) < 0.2


def test_the_time_of_a_loaded_engine_is_explained() -> None:
    fit = fit_engine(loaded(), EngineCosts(), 4_096)
    for rows in (fit.prefill, fit.step):
        told = sum(seconds(fit.costs, factors) for factors, _ in rows)
        assert told == pytest.approx(sum(took for _, took in rows), rel=0.15)


# -- what the turns do not span -----------------------------------------------------------


def alone(number: int, uncached: int, sampled: int, prompt: int = 0) -> Turn:
    """A turn that has the engine to itself, at a speed of SLOW."""
    prompt = prompt or uncached
    begun = 100.0 * number
    filled = begun + SLOW.prefill_s(uncached)
    done = filled + (sampled - 1) * SLOW.step_s(1, prompt + sampled / 2)
    return _turn(number, begun, filled, done, prompt, prompt - uncached, sampled)


def test_batches_of_one_size_keep_the_given_ratio_of_a_step() -> None:
    given = replace(SLOW, **{n: getattr(SLOW, n) * 3 for n in STEP})
    turns = [alone(n, 100 * (n + 1), 20) for n in range(20)]
    costs = fit_engine(turns, given).costs
    assert costs.decode_base_s / costs.decode_request_s == pytest.approx(35 / 2)
    assert costs.step_s(1, 1_000) == pytest.approx(SLOW.step_s(1, 1_000), rel=0.05)


STEP = ("decode_base_s", "decode_request_s", "decode_context_s")


def test_prefills_of_one_length_keep_the_given_ratio() -> None:
    given = replace(SLOW, prefill_base_s=0.3, prefill_linear_s=24.0, prefill_square_s=1.5)
    costs = fit_engine([alone(n, 500, 20) for n in range(20)], given).costs
    assert costs.prefill_s(500) == pytest.approx(SLOW.prefill_s(500), rel=0.01)
    assert costs.prefill_linear_s / costs.prefill_base_s == pytest.approx(80)


# -- least squares ------------------------------------------------------------------------


def test_a_coefficient_that_would_be_negative_is_none() -> None:
    found = least([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0], [1.0] * 3)
    assert found == pytest.approx([2.0, 0.0])


def test_equal_columns_are_not_used_together() -> None:
    found = least([[1.0, 1.0], [2.0, 2.0]], [3.0, 6.0], [1.0, 1.0])
    assert sorted(found) == pytest.approx([0.0, 3.0])


def test_a_row_without_weight_says_nothing() -> None:
    assert least([[1.0], [1.0]], [2.0, 90.0], [1.0, 0.0]) == pytest.approx([2.0])
