"""Where a conversation goes on, and what keeps it where it is."""

from __future__ import annotations

import pytest

from tests.unit.router.hall import Hall


def two() -> Hall:
    """`b` is at home on r, which has room; s has room too."""
    hall = Hall("r", "s")
    hall.begin("b")
    hall.seats.at("b", "r")
    return hall


def test_a_policy_moves_one_to_where_it_goes_on_at_once() -> None:
    hall = two()
    hall.seats.rather("b", "s", 0.0)
    assert hall.seats.home("b") == "s"


def test_a_policy_moves_nobody_to_a_replica_that_takes_no_new_ones() -> None:
    hall = two()
    hall.strange.add("s")
    hall.seats.rather("b", "s", 0.0)
    assert hall.seats.home("b") == "r"


def test_a_policy_moves_nobody_to_where_it_would_be_held() -> None:
    hall = two()
    hall.begin("z")
    hall.seats.at("z", "s")
    hall.reply("z", 965)
    hall.seats.rather("b", "s", 0.0)
    assert hall.seats.home("b") == "r"


def held() -> Hall:
    """`b` is held on r beside `a`; nobody is on s."""
    hall = Hall("r", "s", migrate_prefill_s=0.0)
    for id_, context in (("a", 600), ("b", 380)):
        hall.begin(id_)
        hall.seats.at(id_, "r")
        hall.reply(id_, context)
    assert hall.seats.ready("a", 600, 0.0) == "r"
    assert hall.seats.ready("b", 380, 0.0) == ""
    assert hall.settled() == []
    return hall


def test_a_policy_moves_nobody_that_is_held() -> None:
    hall = held()
    hall.seats.rather("b", "s", 0.0)
    assert hall.seats.home("b") == "r"


def test_a_policy_moves_nobody_that_was_let_on_where_it_waits() -> None:
    hall = held()
    hall.seats.over("a")
    assert hall.settled() == ["b"]
    hall.seats.rather("b", "s", 0.0)
    assert hall.seats.home("b") == "r"


def test_balance_alone_decides_only_while_nobody_is_held() -> None:
    assert two().seats.slack
    assert not held().seats.slack


def test_one_that_goes_on_elsewhere_leaves_its_cache() -> None:
    hall = Hall("r", "s")
    hall.fill(a=600, z=400, b=100)
    hall.seats.at("b", "r")
    hall.reply("b", 380)
    assert hall.seats.ready("b", 380, 0.0) == ""
    assert hall.settled() == ["b"]
    assert (hall.seats.home("b"), hall.seats.kept("b")) == ("s", 0)


def test_one_whose_home_failed_it_leaves_though_that_balances_nothing() -> None:
    hall = Hall("r", "s")
    for id_, home, context in (("a", "r", 100), ("b", "r", 100), ("z", "s", 500)):
        hall.begin(id_)
        hall.seats.at(id_, home)
        hall.turn(id_, context)
    assert hall.seats.ready("b", 100, 0.0) == "r"
    assert hall.seats.ready("b", 100, 0.0, leave=True) == "s"


def test_of_two_that_would_take_it_the_one_where_less_runs() -> None:
    hall = Hall("r", "s", "t")
    for id_, home, context in (("a", "r", 600), ("y", "s", 400), ("z", "t", 300), ("b", "r", 100)):
        hall.begin(id_)
        hall.seats.at(id_, home)
        hall.turn(id_, context)
    hall.settled()
    hall.reply("b", 380)
    assert hall.seats.ready("b", 380, 0.0) == ""
    assert hall.settled() == ["b"]
    assert hall.seats.home("b") == "t"


def test_a_home_that_is_closed_now_and_then_keeps_those_that_it_holds() -> None:
    hall = held()
    for start in (0.0, 60.0):
        hall.closed.add("r")
        hall.seats.every(start)
        hall.closed.clear()
        hall.seats.every(start + 20.0)
    hall.closed.add("r")
    hall.seats.every(120.0)
    hall.seats.every(140.0)
    assert (hall.seats.home("b"), hall.seats.holds("b")) == ("r", True)


def test_a_reply_leaves_itself_in_the_cache_too() -> None:
    hall = two()
    hall.seats.turn_end("b", 100, 50, 100, 0.0)
    assert hall.seats.kept("b") == 150


def test_no_more_of_a_prompt_can_be_missing_than_it_has() -> None:
    hall = Hall()
    hall.grant("r", 100_000)
    hall.fill(a=50_000)
    hall.reply("a", 50_000)
    hall.seats.turn_end("a", 10_000, 0, 10_000, 0.0)
    assert hall.seats._credits["r"].trust == 1.0


@pytest.mark.parametrize(
    "hall",
    [Hall("r", admission="hold_resume"), Hall("r", keepalive_tokens=0)],
    ids=("hold_resume", "switched off"),
)
def test_rules_that_trust_no_cache_touch_none(hall: Hall) -> None:
    hall.fill(a=300, b=100)
    hall.reply("b", 100)
    assert hall.seats.over("a") == ()
