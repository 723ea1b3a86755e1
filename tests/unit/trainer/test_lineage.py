"""Lag is counted along the tree of versions; a stranger is an error."""

from __future__ import annotations

import pytest

from muster.errors import InvalidInput
from services.trainer.lineage import NO_PARENT, VERSIONS_KEPT, Lineage, trajectory_lag
from tests.unit.trainer.stories import prompt, sampled, trajectory

BRANCHED = Lineage({0: NO_PARENT, 1: 0, 2: 1, 5: 1, 6: 5}, 6)  # 2 was gone back from


def test_lag_counts_steps_and_not_numbers() -> None:
    assert [BRANCHED.lag(version) for version in (6, 5, 1, 0)] == [0, 1, 2, 3]


def test_an_abandoned_branch_is_as_far_as_the_way_over_the_fork() -> None:
    assert BRANCHED.lag(2) == 3


def test_a_version_that_the_run_never_made_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="not a version of this run"):
        BRANCHED.lag(3)


def test_a_trajectory_is_as_old_as_its_first_token() -> None:
    item = trajectory("g", 0, 1.0, [prompt(), sampled(1, version=1), sampled(2, version=6)])
    assert trajectory_lag(BRANCHED, item) == 2


def test_a_stranger_among_later_tokens_is_an_error() -> None:
    item = trajectory("g", 0, 1.0, [prompt(), sampled(1, version=6), sampled(2, version=9)])
    with pytest.raises(InvalidInput):
        trajectory_lag(BRANCHED, item)


def test_version_numbers_are_never_reused() -> None:
    gone_back = Lineage({0: NO_PARENT, 1: 0}, 1).join({2: 1, 3: 2})
    assert gone_back.next_version == 4
    with pytest.raises(InvalidInput):
        gone_back.grow(3)


def test_the_tree_is_bounded() -> None:
    lineage = Lineage({0: NO_PARENT}, 0)
    long = lineage.join({v: v - 1 for v in range(1, VERSIONS_KEPT + 50)})
    assert len(long.grow(long.next_version).parents) == VERSIONS_KEPT
