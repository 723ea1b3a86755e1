"""Seats when credits end and replicas go, and under other ranks and rules."""

from __future__ import annotations

import pytest

from tests.unit.router.hall import KV, Hall

# -- credits and replicas ------------------------------------------------------------------------


def test_a_credit_that_ended_admits_nothing_until_it_is_granted_again() -> None:
    hall = Hall()
    hall.grant("r", KV, until=10.0)
    hall.fill(a=100)
    hall.now = 10.0
    assert not hall.seats.launch("b", "b", 1, hall.now)
    assert hall.turn("a", 110) == ""
    assert hall.settled() == []
    hall.grant("r", KV, until=20.0)
    assert hall.settled() == ["a"]


def test_those_at_home_on_a_lost_replica_find_another_and_held_ones_are_asked_at_once() -> None:
    hall = Hall("r")
    hall.fill(a=600, b=300)
    hall.turn("b", 400)
    hall.settled()
    hall.grant("s")
    hall.seats.lost("r")
    assert hall.settled() == ["b"]
    assert hall.seats.ready("b", 400, 0.0) == "s"
    assert hall.seats.ready("a", 600, 0.0) == ""  # both do not fit; the larger one goes first
    assert hall.settled() == ["a"]
    assert hall.seats.ready("a", 600, 0.0) == "s"
    assert hall.turn("b", 400) == ""


def test_those_that_find_a_home_together_are_let_on_in_their_order_and_not_all_of_them() -> None:
    hall = Hall("r")
    hall.fill(a=300, b=250, c=200, d=150)
    hall.seats.lost("r")
    hall.grant("s", 500)
    found = [hall.seats.ready(id_, size, 0.0) for id_, size in (("d", 150), ("c", 200), ("b", 250))]
    assert found == ["s", "s", ""]  # 600 do not fit, however large the last one is
    assert hall.seats.ready("a", 300, 0.0) == ""
    assert hall.settled() == ["a"]
    assert hall.seats.holds("b")


def test_without_any_replica_it_has_no_home_and_is_not_held() -> None:
    hall = Hall("r")
    hall.fill(a=100)
    hall.reply("a", 100)
    hall.seats.lost("r")
    assert hall.seats.ready("a", 100, 0.0) == ""
    assert not hall.seats.holds("a")


def test_what_a_former_router_left_counts_where_its_cache_is_and_waits_for_that() -> None:
    hall = Hall("s")
    hall.seats.patient_until = 10.0
    hall.seats.adopt("a", "a", 400, "r")
    assert hall.seats.ready("a", 400, 5.0) == ""
    assert not hall.seats.holds("a")
    hall.grant("r")
    assert hall.seats.ready("a", 400, 6.0) == "r"


def test_it_waits_no_longer_than_that() -> None:
    hall = Hall("s")
    hall.seats.patient_until = 10.0
    hall.seats.adopt("a", "a", 400, "r")
    assert hall.seats.ready("a", 400, 10.0) == "s"


# -- fairness, ranks, arms -----------------------------------------------------------------------


def test_one_that_is_held_for_too_long_is_the_first_for_one_turn() -> None:
    hall = Hall("r", fair_hold_s=60.0)
    hall.fill(a=600, b=300)
    hall.turn("b", 400)
    hall.settled()
    hall.now = 59.9
    hall.seats.every(hall.now)
    assert hall.settled() == []
    hall.now = 60.0
    hall.seats.every(hall.now)
    assert hall.settled() == ["b"]
    hall.seats.ready("b", 400, hall.now)
    assert hall.turn("b", 400) == ""  # its turn is over: the larger one outranks it again


@pytest.mark.parametrize(
    ("rank", "want"),
    [
        ("largest_context", "xcy"),
        ("smallest_context", "ycx"),
        ("oldest_group", "xyc"),
        ("arrival", "cxy"),
    ],
)
def test_the_rank_says_who_goes_first(rank: str, want: str) -> None:
    hall = Hall("r", rank=rank)
    hall.begin("c")  # of group c, launched first …
    hall.seats.launch("x", "a", 10, 0.0)
    hall.seats.launch("y", "a", 10, 0.0)
    hall.seats._programs["c"].group_number = 9  # … and of a younger group
    for id_, context in (("c", 300), ("x", 400), ("y", 200)):
        hall.turn(id_, context)
    assert "".join(program.id for _, program in hall.seats._rows["r"].ranked) == want


def test_hold_resume_holds_whoever_arrives_above_95_and_resumes_the_smallest_below_80() -> None:
    hall = Hall("r", admission="hold_resume")
    hall.fill(a=500, b=300, c=100)
    assert hall.turn("a", 550) == "r"  # 950
    assert hall.turn("a", 551) == ""
    assert hall.settled() == ["a"]  # 400 go on: below 800
    hall.seats.ready("a", 551, 0.0)
    assert hall.turn("b", 310) == ""
    assert hall.turn("c", 450) == ""
    assert hall.settled() == ["b"]  # the smaller one at 551; 861 is above 800
    hall.seats.over("a")
    assert hall.settled() == ["c"]


def test_pressure_holds_launches_back_and_nothing_else() -> None:
    hall = Hall("r", admission="pressure")
    hall.fill(a=500, b=300)
    assert hall.seats.launch("c", "c", 10, 0.0)  # 800 and the reserve of 100
    assert hall.turn("a", 5000) == "r"
    assert hall.turn("b", 5000) == "r"
    assert not hall.seats.launch("d", "d", 10, 0.0)


def test_why_one_is_held_names_the_room_and_who_goes_first() -> None:
    hall = Hall("r")
    hall.fill(a=600, b=300)
    hall.turn("b", 400)
    told, first = hall.seats.why_held("b", 0.0, lambda *_: "")
    assert "it needs 400 tokens, others fill 600 of 1,000" in told
    assert first == "a"
