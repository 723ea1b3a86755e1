"""The planted bugs of `make planted` fit the code as it is, and seeds see the quickest of them."""

from __future__ import annotations

import pytest

from sim.models import ROUGH
from sim.search import run_one
from tests.faults.planted import hunt
from tests.faults.planting import Bug, Edit, planted, source
from tests.faults.plants import BUGS

QUICK = (
    "acknowledged_before_effect",
    "held_without_resume",
    "credit_ignored",
    "moved_without_abort",
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_fits_the_code_and_leaves_no_trace(bug: Bug) -> None:
    before = [source(edit.where) for edit in bug.edits]
    with planted(bug):
        assert all(source(edit.where) != text for edit, text in zip(bug.edits, before, strict=True))
    assert [source(edit.where) for edit in bug.edits] == before


def test_there_are_twenty_or_more_and_each_has_its_own_name() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 20


def test_a_bug_that_does_not_fit_any_more_is_refused() -> None:
    stale = Edit("services.router.seats:Seats.settle", "what is not there", "")
    with (
        pytest.raises(ValueError, match="has 0 times: what is not there"),
        planted(Bug("stale", "", (stale,), "")),
    ):
        pytest.fail("planted all the same")


@pytest.mark.parametrize("name", QUICK)
def test_seeds_alone_see_it(name: str) -> None:
    bug = next(bug for bug in BUGS if bug.name == name)
    caught = hunt(bug, 20)
    assert caught.seed >= 0, caught.problem


def test_without_a_bug_the_same_seed_holds() -> None:
    assert run_one(0, ROUGH).problem == ""
