"""Which entries of versions, batches and fates are over."""

from __future__ import annotations

from services.readybank.retire import (
    VersionKept,
    batch_over,
    fate_over,
    newest_of_stages,
    version_over,
)

DURABLE, PUBLISHED = 1, 2
OLD, NEW = VersionKept("9-0", 3, PUBLISHED), VersionKept("10-0", 4, PUBLISHED)
SAVED = VersionKept("8-0", 1, DURABLE)


def test_the_newest_of_each_stage_is_that_of_the_highest_version() -> None:
    """After a rollback a smaller one may come later."""
    again = VersionKept("11-0", 2, PUBLISHED)
    assert newest_of_stages([SAVED, OLD, NEW, again]) == {"8-0", "10-0"}


def test_of_one_version_recorded_twice_the_later_entry_is_the_newest() -> None:
    twice = VersionKept("10-0", 3, PUBLISHED)
    assert newest_of_stages([twice, OLD]) == {"10-0"}  # 9 < 10, though not as texts


def test_a_version_is_over_below_the_first_that_is_kept() -> None:
    assert version_over(OLD, 4, frozenset())
    assert not version_over(NEW, 4, frozenset())


def test_a_version_that_is_the_newest_of_its_stage_is_never_over() -> None:
    assert not version_over(SAVED, 100, frozenset({SAVED.id}))


def test_a_version_without_a_stage_is_over_even_as_the_newest() -> None:
    assert version_over(VersionKept("1-0", 100, 0), 4, frozenset({"1-0"}))


def test_the_batch_of_the_mark_stays() -> None:
    assert [batch_over(step, 2) for step in (1, 2, 3)] == [True, False, False]


def test_a_fate_is_over_when_its_group_is_gone_or_it_names_none() -> None:
    gone = {"job-1"}.__contains__
    assert [fate_over(group, gone) for group in ("job-1", "job-2", "")] == [True, False, True]
