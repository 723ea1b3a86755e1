"""Credit comes from the valid siblings of a group, and from nothing else."""

from __future__ import annotations

import pytest

from muster.advantage import Estimator, assign_credit
from muster.errors import InvalidInput
from muster.types import Outcome
from tests.unit.trainer.stories import group, trajectory


def advantages(*rewards: float | None, by: Estimator = "grpo") -> list[float | None]:
    credit = assign_credit(group("g", *rewards), by)
    return [credit.advantages.get(("g", i)) for i in range(len(rewards))]


def test_an_infrastructure_failure_enters_neither_mean_nor_deviation() -> None:
    assert advantages(1.0, 3.0, 2.0, None) == pytest.approx([-1.0, 1.0, 0.0, None], abs=2e-6)


def test_one_success_among_four() -> None:
    assert advantages(1.0, 0.0, 0.0, 0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=4e-6)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_say_nothing(reward: float) -> None:
    assert advantages(reward, reward, reward) == [0.0, 0.0, 0.0]


def test_a_single_valid_sibling_gets_no_credit() -> None:
    credit = assign_credit(group("g", 1.0, None, None))
    assert credit.advantages == {("g", 0): 0.0}
    assert credit.groups[0].valid == 1
    assert credit.groups[0].excluded == 2
    assert credit.groups_with_variance == 0


def test_unknown_outcomes_are_excluded_too() -> None:
    odd = trajectory("g", 2, 1.0, outcome=Outcome.UNKNOWN)
    credit = assign_credit([*group("g", 1.0, 0.0), odd])
    assert ("g", 2) not in credit.advantages
    assert credit.groups[0].mean == 0.5


def test_two_records_of_one_episode_count_once() -> None:
    once, twice = group("g", 1.0, 0.0, 0.0), group("g", 1.0, 0.0, 0.0)
    assert assign_credit([*once, twice[0]]).advantages == assign_credit(once).advantages


def test_two_records_of_one_episode_must_agree() -> None:
    with pytest.raises(InvalidInput, match="different rewards"):
        assign_credit([trajectory("g", 0, 1.0), trajectory("g", 0, 0.0)])


def test_contexts_of_one_episode_do_not_multiply_its_reward() -> None:
    """Four records, two episodes: mean and deviation are those of two rewards."""
    split = [trajectory("g", 0, 1.0), trajectory("g", 0, 1.0), trajectory("g", 0, 1.0)]
    (credit,) = assign_credit([*split, trajectory("g", 1, 0.0)]).groups
    assert (credit.valid, credit.mean) == (2, 0.5)
    assert credit.std == pytest.approx(0.5**0.5)


def test_groups_with_the_same_prompt_are_two_groups() -> None:
    """Merged, the four rewards 1, 0, 1, 1 would have the mean 0.75."""
    first, second = group("a", 1.0, 0.0), group("b", 1.0, 1.0)
    assert first[0].segments == second[0].segments
    credit = assign_credit([*first, *second])
    assert [g.mean for g in credit.groups] == [0.5, 1.0]
    assert [credit.advantages["b", i] for i in range(2)] == [0.0, 0.0]


def test_groups_do_not_mix() -> None:
    credit = assign_credit([*group("a", 1.0, 0.0), *group("b", 9.0, 9.0)])
    assert credit.advantages["b", 0] == 0.0
    assert credit.groups_with_variance == 1


def test_a_failure_without_a_verdict_counts_as_zero() -> None:
    failed = trajectory("g", 1, None, outcome=Outcome.MODEL_FAILURE)
    credit = assign_credit([trajectory("g", 0, 1.0), failed])
    assert credit.groups[0].mean == 0.5


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidInput, match="finite"):
        assign_credit(group("g", float("nan"), 1.0))


def test_without_the_deviation_it_is_the_distance_from_the_mean() -> None:
    assert advantages(1.0, 0.0, None, 0.0, 0.0, by="grpo_unscaled") == pytest.approx(
        [0.75, -0.25, None, -0.25, -0.25]
    )


def test_leave_one_out_is_the_distance_from_the_others() -> None:
    # 1 − (0 + 0.5)/2, 0 − (1 + 0.5)/2, 0.5 − (1 + 0)/2
    assert advantages(1.0, 0.0, 0.5, None, by="rloo") == pytest.approx([0.75, -0.75, 0.0, None])


@pytest.mark.parametrize("by", ["grpo", "grpo_unscaled", "rloo"])
@pytest.mark.parametrize("rewards", [(0.1, 0.1, 0.1), (1.0, None), (1.0,)])
def test_no_estimator_credits_what_cannot_be_compared(
    by: Estimator, rewards: tuple[float | None, ...]
) -> None:
    """A singleton's raw reward must not become its advantage, nor 1e-17 over 1e-6."""
    assert set(advantages(*rewards, by=by)) <= {0.0, None}
