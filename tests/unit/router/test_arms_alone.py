"""Corners of the rules by name: nothing begins beside one that waits, and nobody waits for ever."""

from __future__ import annotations

import pytest

from services.router.credits import Credit
from services.router.programs import Program
from services.router.ranks import rank_of
from tests.unit.router.hall import Hall


@pytest.mark.parametrize(("admission", "most"), [("kv_fit", 121), ("hold_resume", 101)])
def test_nothing_begins_where_one_is_held_though_there_is_room_for_it(
    admission: str, most: int
) -> None:
    hall = Hall("r", reserve=20, admission=admission)
    hall.fill(a=850, b=50)
    assert hall.turn("b", most) == ""
    assert hall.settled() == []
    assert not hall.seats.has_room(0.0)


def test_a_launch_leaves_free_what_its_fill_says() -> None:
    hall = Hall("r", reserve=300, launch_fill=0.5)
    hall.begin("a")
    assert not hall.seats.has_room(0.0)


@pytest.mark.parametrize("admission", ["kv_fit", "hold_resume", "pressure"])
def test_whoever_is_alone_begins_and_goes_on_however_large(admission: str) -> None:
    hall = Hall("r", reserve=2_000, admission=admission)
    assert hall.begin("a") == "r"
    assert hall.turn("a", 5_000) == "r"


def test_a_credit_below_nothing_is_none() -> None:
    credit = Credit()
    credit.told(-5, 10.0, anew=False)
    assert credit.left(1.0) == 0.0


def program(
    number: int, group: int, context: int, *, since: float = 0.0, aged: bool = False
) -> Program:
    return Program(str(number), "g", number, group, context, "r", since=since, aged=aged)


def test_of_those_that_were_held_for_too_long_the_one_that_waits_longest_is_first() -> None:
    rank = rank_of("largest_context")
    late, early = program(1, 1, 90, since=20.0, aged=True), program(2, 2, 10, since=5.0, aged=True)
    assert rank(early) < rank(late) < rank(program(3, 3, 10**6))


def test_within_the_oldest_group_the_largest_is_first() -> None:
    rank = rank_of("oldest_group")
    small, large, younger = program(1, 1, 10), program(3, 1, 90), program(2, 2, 500)
    assert rank(large) < rank(small) < rank(younger)
