"""A model is fitted to a run whose parameters are known: they come out again."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from muster.entries import RunRecord, Turn
from muster.errors import InvalidInput
from muster.types import EpisodeKey, EpisodeState, Outcome, OutcomeLabel, StateInterval
from sim.rollout import fit_model
from sim.rollout.costs import EngineCosts
from sim.rollout.fit import Given, fit
from sim.rollout.fit_engine import fit_engine
from sim.rollout.fit_model import Goodness, Model
from sim.rollout.workload import TB_LIKE, Spread
from tests.unit.rollout.recorded import Played

KNOWN = replace(
    TB_LIKE,
    name="known",
    groups=20,
    group_size=4,
    turns=Spread(6, 0.6),
    tool=Spread(1.0, 1.0),
    observation=Spread(400, 0.5),
    sampled=Spread(100, 0.5),
    verify=Spread(5, 0.5),
    cold=Spread(10, 0.3),
)
COSTS = EngineCosts(0.02, 0.2, 0.002, 0.03, 0.0002, 5e-7)  # of another engine than the published


@cache
def record() -> RunRecord:
    return Played(KNOWN, COSTS).record()


@cache
def fitted() -> Model:
    return fit(record(), Given(kv_tokens=600_000, turns_max=100, boxes=80))


@pytest.mark.parametrize("name", ["turns", "tool", "observation", "sampled", "verify", "cold"])
def test_spreads_come_out_as_they_went_in(name: str) -> None:
    got, want = getattr(fitted().regime, name), getattr(KNOWN, name)
    assert got.median == pytest.approx(want.median, rel=0.2)
    assert got.sigma == pytest.approx(want.sigma, rel=0.2)


def test_what_is_counted_comes_out_exactly() -> None:
    got = fitted().regime
    assert (got.groups, got.group_size, got.replicas, got.boxes) == (20, 4, 1, 80)
    assert got.hazard_per_s == 0.0
    assert got.system_tokens == pytest.approx(1_800, abs=16)
    assert got.prompt_tokens == 3_000


@pytest.mark.parametrize("uncached", [200, 1_000, 3_000])
def test_prefill_costs_what_the_engine_took_for_it(uncached: int) -> None:
    want = COSTS.prefill_s(uncached)
    assert fitted().engine.prefill_s(uncached) == pytest.approx(want, rel=0.15)


@pytest.mark.parametrize("running", [4, 16, 40])
def test_a_step_costs_what_the_engine_took_for_it(running: int) -> None:
    want = COSTS.step_s(running, running * 6_000)
    assert fitted().engine.step_s(running, running * 6_000) == pytest.approx(want, rel=0.1)


def test_the_model_says_how_well_it_fits() -> None:
    goodness = fitted().goodness
    assert {"turns", "tool_s", "prefill_s", "step_s", "verify_s"} <= goodness.keys()
    assert all(0.8 < good.median_ratio < 1.25 for good in goodness.values())


def test_the_recorded_time_to_batch_is_kept_beside() -> None:
    assert fitted().batch_s == pytest.approx(50.0)  # the second batch; the first one was cold


def test_what_the_record_cannot_tell_is_named() -> None:
    notes = " ".join(fit(record()).notes)
    assert "--kv-tokens" in notes
    assert "boxes" in notes
    (costs,) = fitted().notes
    assert all(f"{name} = " in costs for name in EngineCosts.__struct_fields__)


def test_turns_that_a_cap_cuts_are_fitted_by_their_lower_half() -> None:
    capped = Played(replace(KNOWN, turns_max=8), COSTS).record()
    assert fit(capped).regime.turns.sigma == pytest.approx(0.6, rel=0.3)


def test_lost_attempts_give_the_rate_of_losses() -> None:
    whole = record()
    lost = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
    labels = [replace(x, label=lost) if n < 8 else x for n, x in enumerate(whole.labels)]
    regime = fit(replace(whole, labels=tuple(labels))).regime
    seconds = sum(f.finished_unix_s - f.started_unix_s for f in whole.finished)
    assert regime.hazard_per_s == pytest.approx(8 / seconds, rel=0.2)


def test_a_run_in_which_nothing_ended_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no episode of that run has ended"):
        fit(RunRecord("young"))


def turn(number: int, uncached: int, prefill_s: float) -> Turn:
    key = EpisodeKey("r", "g", number, 0, 1)
    start = 1_000.0 * number
    prefill = StateInterval(EpisodeState.PREFILL, start, start + prefill_s)
    spans = (prefill,)
    return Turn(f"{number}-0", key, 0, 0, uncached, 4, 0, (), "replica-0", spans)


def test_too_few_turns_leave_the_given_constants() -> None:
    found = fit_engine([turn(n, 1_000, 1.0) for n in range(4)], COSTS)
    assert (found.costs, found.prefill_told, found.step_told) == (COSTS, False, False)


def test_no_constant_is_below_zero() -> None:
    falling = [turn(n, 1_000 * (n + 1), 10.0 - n) for n in range(9)]
    costs = fit_engine(falling, COSTS).costs
    assert min(costs.prefill_base_s, costs.prefill_linear_s, costs.prefill_square_s) >= 0


def test_one_odd_turn_moves_nothing() -> None:
    plain = [turn(n, 1_000 + 100 * n, 0.5 + 0.1 * n) for n in range(40)]
    odd = [*plain, turn(40, 1_000, 400.0)]
    want = fit_engine(plain, COSTS).costs.prefill_s(2_000)
    assert fit_engine(odd, COSTS).costs.prefill_s(2_000) == pytest.approx(want, rel=0.01)


def test_a_model_reads_back_equal(tmp_path: Path) -> None:
    fit_model.write(fitted(), tmp_path / "model.json")
    assert fit_model.read(tmp_path / "model.json") == fitted()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read"),
        ("hello", "is no model"),
        ("{}", "of format 0"),
        ('{"kind": "muster-sim-model", "format": 9}', "of format 9"),
        ('{"kind": "muster-sim-model", "format": 1}', "damaged"),
    ],
)
def test_a_file_that_is_no_model_is_refused_with_the_way_out(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    path = tmp_path / "model.json"
    if text is not None:
        path.write_text(text, "utf-8")
    with pytest.raises(InvalidInput, match=problem) as refused:
        fit_model.read(path)
    assert "muster sim fit" in refused.value.way_out


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be written"):
        fit_model.write(fitted(), tmp_path / "none" / "model.json")


def test_a_median_of_nothing_is_no_reason_to_doubt() -> None:
    zero = (0.0, 0.0, 0.0)
    assert Goodness(1, zero, zero).median_ratio == 1.0
    assert Goodness(1, zero, (1.0, 1.0, 1.0)).median_ratio == float("inf")
