"""What an arm is in the production configuration."""

from __future__ import annotations

import pytest

from services.router.rules import RouterRules
from sim.rollout import arms
from sim.rollout.arms import Arm
from sim.rollout.workload import ENV_BOUND, TB_LIKE


def changed(one: RouterRules, other: RouterRules) -> set[str]:
    """The rules that two routers do not share."""
    names = RouterRules.__struct_fields__
    return {name for name in names if getattr(one, name) != getattr(other, name)}


@pytest.mark.parametrize(
    ("lever", "rules"),
    [
        ("routing", {"placement"}),
        ("boxes", set()),
        ("assembly", {"lag_max", "repairs_max"}),
        ("admission", {"admission"}),
        ("priority", {"rank"}),
    ],
)
def test_a_lever_changes_what_it_names_and_nothing_else(lever: str, rules: set[str]) -> None:
    without = Arm("without", tuple(x for x in arms.LEVERS if x != lever))
    found = changed(arms.router_rules(arms.MUSTER, TB_LIKE), arms.router_rules(without, TB_LIKE))
    assert found == rules


def test_all_arms_have_the_same_boxes_and_starts() -> None:
    for regime in (TB_LIKE, ENV_BOUND):
        for arm in arms.ARMS.values():
            rules = arms.pool_rules(arm, regime)
            assert rules.boxes_max * arms.HOSTS == regime.boxes
            assert rules.starting_max * arms.HOSTS == regime.cold_at_once
            assert rules.building_max * arms.HOSTS == regime.cold_at_once


def test_without_assembly_only_a_group_of_valid_siblings_is_trained_on() -> None:
    barrier = arms.bank_rules(arms.MACHINE_PLAIN, TB_LIKE)
    assert (barrier.repairs_max, barrier.valid_min) == (0, TB_LIKE.group_size)
    assert arms.bank_rules(arms.MUSTER, TB_LIKE).repairs_max == arms.REPAIRS_MAX


def test_a_tighter_lag_is_an_arm_of_its_own() -> None:
    tight = arms.ARMS["launched at most 1 ahead"]
    assert changed(arms.router_rules(arms.MUSTER, TB_LIKE), arms.router_rules(tight, TB_LIKE)) == {
        "lag_max"
    }


def test_each_group_has_a_task_of_its_own() -> None:
    job = arms.job(TB_LIKE, 40)
    assert len({task.digest for task in job.tasks}) >= 2 * job.groups
