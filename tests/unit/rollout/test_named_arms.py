"""What each arm of the lever table is, by the name that the table shows."""

from __future__ import annotations

import pytest

from services.router.rules import RouterRules
from sim.rollout.arms import ARMS, LEVERS, router_rules
from sim.rollout.figures import Fleet, figures
from sim.rollout.measure import Recorder
from sim.rollout.workload import TB_LIKE


def rules(name: str) -> RouterRules:
    return router_rules(ARMS[name], TB_LIKE)


@pytest.mark.parametrize("lever", LEVERS)
def test_only_and_without_name_one_lever(lever: str) -> None:
    assert ARMS[f"only {lever}"].levers == (lever,)
    assert set(ARMS[f"without {lever}"].levers) == set(LEVERS) - {lever}


def test_admission_and_priority_are_two_levers() -> None:
    assert set(ARMS["only admission + priority"].levers) == {"admission", "priority"}
    assert set(ARMS["muster"].levers) == set(LEVERS)
    assert ARMS["machine, no lever"].levers == ()


@pytest.mark.parametrize(
    ("name", "rule", "value"),
    [
        ("muster", "placement", "predicted_finish"),
        ("muster", "admission", "kv_fit"),
        ("muster", "rank", "largest_context"),
        ("machine, no lever", "placement", "least_loaded"),
        ("machine, no lever", "admission", "none"),
        ("machine, no lever", "rank", "arrival"),
        ("smallest context first", "rank", "smallest_context"),
        ("oldest group first", "rank", "oldest_group"),
        ("hold above 95 %, resume the smallest", "admission", "hold_resume"),
        ("launches held back by pressure", "admission", "pressure"),
        ("sticky least-loaded", "placement", "sticky_least_loaded"),
    ],
)
def test_a_name_is_the_rule_that_it_says(name: str, rule: str, value: str) -> None:
    assert getattr(rules(name), rule) == value


def test_no_budget_of_the_router_ends_what_a_plan_allows() -> None:
    """Else an arm would train shorter episodes than the others."""
    for name in ARMS:
        found = rules(name)
        assert found.turns_max > TB_LIKE.turns_max
        assert found.context_tokens_max == TB_LIKE.context_limit
        assert found.step_timeout_s == TB_LIKE.step_limit_s
        assert found.infra_ceiling == 1.0


@pytest.mark.parametrize(("size", "worst"), [(64, 0.5), (63, 1.0)])
def test_the_worst_distance_is_over_cohorts_of_at_least_64(size: int, worst: float) -> None:
    """Half of a cohort's trajectories end with other durations than were dispatched."""
    told = Recorder(group_size=1, replicas=1, peak_rate=1.0)
    for group in range(3 + size):
        if group < 3:  # the first cohorts are left out
            told.launched(group, 0, 0, 1.0, 0.0)
            told.finished(group, 0, 1.0)
            told.cut([group], 1.0)
            continue
        told.launched(group, 0, 0, 10.0, 2.0)
        if group < 3 + size // 2:
            told.failed(group, 0, 3.0)
            told.launched(group, 0, 1, 5.0, 3.0)
        told.finished(group, 0, 4.0)
    told.cut(range(3, 3 + size), 5.0)
    fleets = [Fleet(batch.at, (batch.at,), 0, 0) for batch in told.batches]
    assert figures(told, fleets, arm="x", regime="y", seed=1).ks_worst == worst
