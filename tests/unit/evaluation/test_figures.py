"""What groups of an evaluation come to."""

from __future__ import annotations

import random
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.evaluated import EvaluatedGroup, EvaluatedSibling
from muster.evaluated_codec import from_pb, to_pb
from muster.evaluation import Interval, bootstrap, overall_of, tasks_of, versions_of, wilson
from muster.types import Outcome, OutcomeLabel, SamplingParams
from sim.builders import INFRA, UNKNOWN, scored

PASSED, FAILED = scored(1.0), scored(0.0)


def sibling(label: OutcomeLabel, number: int = 0, **fields: object) -> EvaluatedSibling:
    given: dict = {"attempt": 0, "turns": 2, "prompt_tokens": 30, "sampled_tokens": 10}
    given |= {"versions": (0,), "replicas": ("r",)} | fields
    return EvaluatedSibling(number, label=label, **given)


def group(task: str, *siblings: EvaluatedSibling, at: float = 5.0) -> EvaluatedGroup:
    return EvaluatedGroup(f"v-{task}", "v", task, SamplingParams(0.5), 1.0, at, siblings)


def test_infrastructure_and_unknown_are_counted_and_enter_no_figure() -> None:
    groups = [group("a", sibling(PASSED), sibling(FAILED), sibling(INFRA), sibling(UNKNOWN))]
    (task,) = tasks_of(groups)
    assert (task.samples, task.valid, task.passed, task.infra) == (4, 2, 1, 2)
    assert (task.pass_rate, task.reward_mean) == (0.5, 0.5)
    found = overall_of((task,), groups)
    assert (found.samples, found.valid, found.infra, found.pass_rate) == (4, 2, 2, 0.5)
    assert found.sampled_tokens == 40  # of all, for that is what it cost


def test_a_task_without_a_valid_sample_has_no_rate_and_is_no_zero() -> None:
    groups = [group("a", sibling(INFRA)), group("b", sibling(PASSED))]
    tasks = tasks_of(groups)
    assert (tasks[0].pass_rate, tasks[0].pass_interval, tasks[0].reward_mean) == (None, None, None)
    found = overall_of(tasks, groups)
    assert (found.pass_rate, found.tasks, found.tasks_solved) == (1.0, 2, 1)


def test_each_task_has_one_voice_however_many_samples_it_has() -> None:
    groups = [group("a", *[sibling(PASSED)] * 9), group("b", sibling(FAILED))]
    assert overall_of(tasks_of(groups), groups).pass_rate == 0.5


def test_instances_are_one_task() -> None:
    groups = [group("a@1000001", sibling(PASSED)), group("a@1000000", sibling(FAILED))]
    (task,) = tasks_of(groups)
    assert (task.task, task.groups, task.pass_rate) == ("a", 2, 0.5)
    assert task.instances == ("a@1000000", "a@1000001")


def test_a_partial_reward_counts_for_the_mean_and_is_no_pass() -> None:
    (task,) = tasks_of([group("a", sibling(OutcomeLabel(Outcome.MODEL_FAILURE, "x", 0.25)))])
    assert (task.pass_rate, task.reward_mean) == (0.0, 0.25)


def test_attempts_that_were_made_again_are_counted() -> None:
    groups = [group("a", sibling(PASSED, attempt=2), sibling(PASSED))]
    assert tasks_of(groups)[0].repaired == overall_of(tasks_of(groups), groups).repaired == 2


def test_versions_are_told_apart_and_a_sample_across_two_is_of_neither() -> None:
    groups = [
        group("a", sibling(PASSED, versions=(3,)), sibling(FAILED, versions=(4,))),
        group("b", sibling(PASSED, versions=(3, 4)), sibling(FAILED, versions=())),
    ]
    found = {v.versions: (v.samples, v.pass_rate) for v in versions_of(groups)}
    assert found == {(3,): (1, 1.0), (3, 4): (1, 1.0), (4,): (1, 0.0)}


@pytest.mark.parametrize(
    ("passed", "of", "low", "high"),
    # R: binom::binom.wilson; also Newcombe (1998), table I, method 3, for 81 of 263 and 15 of 148.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_is_the_published_one(
    passed: int, of: int, low: float, high: float
) -> None:
    found = wilson(passed, of)
    assert found is not None
    assert isclose(found.low, low, abs_tol=6e-5)
    assert isclose(found.high, high, abs_tol=6e-5)


@given(st.integers(1, 400), st.data())
def test_the_point_lies_in_wilsons_interval(of: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, of))
    found = wilson(passed, of)
    assert found is not None
    assert 0.0 <= found.low <= passed / of <= found.high <= 1.0


def test_wilsons_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    chance = random.Random(3)
    hits = 0
    for _ in range(1000):
        truth = chance.uniform(0.05, 0.95)
        found = wilson(sum(chance.random() < truth for _ in range(40)), 40)
        assert found is not None
        hits += found.low <= truth <= found.high
    assert 920 <= hits <= 980


def test_the_bootstrap_says_the_same_each_time_and_narrows_with_tasks() -> None:
    few, many = [0.0, 1.0] * 4, [0.0, 1.0] * 100
    assert bootstrap(few) == bootstrap(few)
    wide, narrow = bootstrap(few), bootstrap(many)
    assert wide is not None
    assert narrow is not None
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    # The normal approximation for 200 tasks of deviation 0.5.
    assert isclose(narrow.high - narrow.low, 2 * 1.96 * 0.5 / 200**0.5, rel_tol=0.15)


def test_one_task_says_nothing_about_others() -> None:
    assert bootstrap([0.5]) is None
    assert bootstrap([0.5, 0.5]) == Interval(0.5, 0.5)


def test_a_group_travels_whole() -> None:
    sent = group(
        "a@7",
        sibling(PASSED, attempt=1, versions=(1, 2), replicas=("r0", "r1")),
        sibling(OutcomeLabel(Outcome.MODEL_FAILURE, "not_passed", 0.5, flaky=True), 1),
        sibling(INFRA, 2),
    )
    assert from_pb(to_pb("run", sent)) == sent
