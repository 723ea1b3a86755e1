"""The oldest version in the KV of a running request."""

from __future__ import annotations

from services.inference.floors import Floors


def test_a_request_that_sees_no_commit_has_kv_of_its_own_version() -> None:
    floors = Floors(3)
    floors.begun("a")
    assert floors.ended("a") == {3: 3}


def test_kept_kv_stays_as_old_as_it_was_however_often_it_is_kept() -> None:
    floors = Floors(3)
    floors.begun("a")
    floors.committed(4, kept=True)
    floors.begun("b")
    floors.committed(7, kept=True)
    assert floors.ended("a") == {3: 3, 4: 3, 7: 3}
    assert floors.ended("b") == {4: 4, 7: 4}


def test_computed_again_it_is_new() -> None:
    floors = Floors(3)
    floors.begun("a")
    floors.committed(4, kept=True)
    floors.committed(5, kept=False)
    floors.committed(6, kept=True)
    assert floors.ended("a") == {3: 3, 4: 3, 5: 5, 6: 5}


def test_a_version_of_before_may_come_again() -> None:
    """A trainer that went back publishes an older number: its KV is of that time, not of before."""
    floors = Floors(3)
    floors.begun("a")
    floors.committed(2, kept=False)
    assert floors.ended("a") == {3: 3, 2: 2}


def test_nothing_is_kept_of_a_request_that_is_over() -> None:
    floors = Floors(0)
    floors.begun("a")
    floors.ended("a")
    floors.committed(1, kept=True)
    assert floors.ended("a") == {}


def test_prompts_after_kept_kv_share_nothing_with_those_before() -> None:
    floors = Floors(3)
    before = floors.salt
    floors.committed(4, kept=False)
    assert floors.salt == before  # what is computed again is of version 4: the next turn may use it
    floors.committed(5, kept=True)
    assert floors.salt != before
