"""Dispatched against trained, by launch cohort: a fair batch shows nothing, a biased one does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.bias import Bias, bias, ks, slope
from muster.run_index import RunIndex
from muster.types import Outcome, OutcomeLabel
from muster.v1 import events_pb2 as ev

PASSED = OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", 1.0)
FAILED = OutcomeLabel(Outcome.MODEL_FAILURE, "not_passed", 0.0)
LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
Story = Any


def found(story: Story) -> Bias:
    return bias(RunIndex(story.record()))


def group(story: Story, number: int, *, at: float, turns: int = 2, passed: int = 1) -> str:
    """Two siblings that began at `at`; each turn takes 2 s and samples 5 tokens."""
    name = f"job-{number:05d}"
    opened = ev.GroupOpened(job="job", task="t", group_size=2, opened_unix_s=at)
    story.add("events", story._event(story._key(name, 0, 0), 0, group_opened=opened))
    for sibling in range(2):
        label = PASSED if sibling < passed else FAILED
        story.episode(name, sibling, turns=turns, label=label, at=at)
    return name


def test_a_cohort_that_was_trained_whole_shows_no_distance(good: Story) -> None:
    result = found(good)
    assert [c.after_batch for c in result.cohorts] == [0]
    [cohort] = result.cohorts
    assert (cohort.groups, cohort.groups_trained, cohort.trajectories_open) == (2, 2, 0)
    assert cohort.dispatched == cohort.trained
    assert (cohort.ks_duration, cohort.ks_tokens_weighted) == (0.0, 0.0)
    assert result.pass_rate_difference == 0.0


def test_groups_belong_to_the_cohort_between_the_cuts(story: Story) -> None:
    story.job(groups=3)
    first, second = group(story, 0, at=10), group(story, 1, at=20)
    story.train(1, {first: [0, 0]}, complete=25)
    story.train(2, {second: [0, 0]}, complete=40)
    group(story, 2, at=30)
    assert [(c.after_batch, c.groups, c.groups_open) for c in found(story).cohorts] == [
        (0, 2, 0),
        (1, 1, 1),
    ]
    assert found(story).cohorts_settled == 1


def test_a_batch_that_drops_long_groups_is_told(story: Story) -> None:
    story.job(groups=4)
    short = [group(story, n, at=10) for n in range(3)]
    long = group(story, 3, at=10, turns=9, passed=2)
    story.train(1, {name: [0, 0] for name in short}, complete=50)
    story.fate(long, reason="too_old")
    [cohort] = found(story).cohorts
    assert cohort.ks_duration == pytest.approx(0.25)
    assert cohort.ks_tokens == pytest.approx(0.25)
    assert cohort.dispatched.duration_mean_s == 5 + (19 - 5) / 4
    assert cohort.trained.duration_mean_s == 5
    assert found(story).pass_rate_difference == 0.5 - 5 / 8
    assert found(story).ks_duration_max == pytest.approx(0.25)


def test_a_group_without_variance_has_no_gradient_weight(story: Story) -> None:
    """It is long, and trained on: counted once, but it moves no weights."""
    story.job(groups=2)
    story.train(1, {group(story, 0, at=10): [0, 0]}, complete=30)
    story.train(2, {group(story, 1, at=10, turns=9, passed=0): [0, 0]}, complete=40)
    [cohort] = found(story).cohorts
    assert cohort.trained.duration_mean_s == 12
    assert cohort.trained.duration_mean_weighted_s == 5


def test_a_repaired_siblings_duration_begins_with_its_first_attempt(story: Story) -> None:
    story.job(groups=1)
    story.opened("job-00000", size=1)
    story.episode("job-00000", 0, 0, label=LOST, at=10)
    story.episode("job-00000", 0, 1, at=30)
    [cohort] = found(story).cohorts
    assert cohort.dispatched.duration_mean_s == 25


def test_what_is_still_running_is_counted_beside(story: Story) -> None:
    story.job(groups=1)
    story.opened("job-00000")
    story.episode("job-00000", 0)
    [cohort] = found(story).cohorts
    assert (cohort.trajectories_open, cohort.dispatched.trajectories) == (1, 1)
    assert cohort.ks_duration is None
    assert found(story).ks_duration_max is None


def test_lag_that_grows_with_duration_has_a_slope(story: Story) -> None:
    for version in range(4):
        story.version(version, version - 1)
    story.job(groups=1)
    story.opened("job-00000")
    story.episode("job-00000", 0, turns=1, version=3)  # 3 s, lag 0
    story.episode("job-00000", 1, turns=6, version=1)  # 13 s, lag 2
    story.batch(1, {"job-00000": [0, 0]}, version=3, trained=True)
    assert found(story).lag_slope_per_s == pytest.approx(0.2)


VALUES = st.lists(st.tuples(st.integers(0, 6).map(float), st.integers(0, 3).map(float)), max_size=8)


@given(VALUES, VALUES)
def test_ks_equals_a_dumb_oracle(
    one: list[tuple[float, float]], other: list[tuple[float, float]]
) -> None:
    def below(sample: list[tuple[float, float]], x: float) -> float:
        return sum(w for v, w in sample if v <= x) / sum(w for _, w in sample)

    if not sum(w for _, w in one) or not sum(w for _, w in other):
        assert ks(one, other) is None
        return
    widest = max(abs(below(one, x) - below(other, x)) for x in range(7))
    assert ks(one, other) == pytest.approx(widest)


def test_a_slope_needs_two_different_durations() -> None:
    assert slope([]) is None
    assert slope([(1, 2), (1, 5)]) is None
    assert slope([(0, 1), (2, 5)]) == 2
