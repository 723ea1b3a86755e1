"""Which versions can still be sent, and which are let go."""

from __future__ import annotations

import pytest

from muster.transfer.newest import Newest


def made(newest: Newest[str], *versions: int) -> None:
    for version in versions:
        newest.forget_old(version)
        newest.keep(version, f"weights {version}")


def test_the_newest_two_are_there_and_no_others() -> None:
    newest: Newest[str] = Newest()
    made(newest, 1, 2, 3)
    assert [newest.of(version) for version in (2, 3)] == ["weights 2", "weights 3"]
    with pytest.raises(KeyError):
        newest.of(1)


def test_a_publication_that_is_tried_again_finds_its_version_whatever_was_made_meanwhile() -> None:
    newest: Newest[str] = Newest()
    made(newest, 1)
    newest.of(1)
    made(newest, 2, 3, 4)
    assert newest.of(1) == "weights 1"
    newest.of(4)
    with pytest.raises(KeyError):
        newest.of(1)


def test_a_version_that_is_made_again_costs_the_one_before_nothing() -> None:
    newest: Newest[str] = Newest()
    made(newest, 1, 2, 2)
    assert newest.of(1) == "weights 1"


def test_the_memory_of_all_but_the_one_before_is_free_when_a_version_is_made() -> None:
    newest: Newest[str] = Newest()
    made(newest, 1, 2)
    newest.forget_old(3)
    assert newest.of(2) == "weights 2"
    with pytest.raises(KeyError):
        newest.of(1)
