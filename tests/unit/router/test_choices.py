"""Every choice is told with its terms: to the journal in the command, to people by explain."""

from __future__ import annotations

import pytest

from services.router import events as e
from tests.unit.router.granted import Fleet, held, told
from tests.unit.router.test_machine import silent
from tests.unit.router.world import World, job


def test_a_box_is_asked_for_with_the_boxes_that_each_host_had() -> None:
    world = World().on(e.AcquireBox, silent).feed(job(size=3)).start(hosts=2)
    asked = world.sent(e.AcquireBox)
    assert [(c.host, c.why) for c in asked] == [(h, "fewest_boxes") for h in ("h0", "h1", "h0")]
    assert [c.terms for c in asked] == [
        {"h0": 0, "h1": 0},
        {"h0": 1, "h1": 0},
        {"h0": 1, "h1": 1},
    ]


def test_a_choice_among_many_hosts_names_the_chosen_and_the_next_best() -> None:
    world = World().on(e.AcquireBox, silent).feed(job(size=1)).start(hosts=40)
    [asked] = world.sent(e.AcquireBox)
    assert asked.host in asked.terms
    assert len(asked.terms) == 8


def test_a_launch_names_its_seat_and_what_was_given_away_before_it() -> None:
    world = Fleet(replicas=2).feed(job(size=3, max_turns=9))
    assert [(c.home, c.home_terms) for c in world.sent(e.AcquireBox)] == [
        ("r0", {"r0": 0, "r1": 0}),
        ("r1", {"r0": 100, "r1": 0}),
        ("r0", {"r0": 100, "r1": 100}),
    ]


def test_a_turn_after_a_hold_says_why_it_was_held_and_for_how_long() -> None:
    world = held()
    world.wait(2.0)
    world.feed(told())
    world.reply(0, 620, "DONE")
    turn = world.asked(1)[-1]
    assert turn.turn == 1
    assert {k: turn.held[k] for k in ("tokens", "kv", "live", "load", "before")} == {
        "tokens": 400,
        "kv": 1000,
        "live": 600,
        "load": 600,
        "before": 1,
    }
    assert turn.held["held_s"] == pytest.approx(2.0)


def test_the_turn_after_that_one_was_not_held() -> None:
    world = held()
    world.reply(0, 620, "DONE")
    world.reply(1, 420)
    turn = world.asked(1)[-1]
    assert (turn.turn, turn.held) == (2, {})


def test_people_are_told_each_choice() -> None:
    world = held()
    world.reply(0, 620, "DONE")
    box, seat, request, _ = world.said("j-00000.1.0")
    assert box.state == "its box is on h0: no other host could be taken (boxes: h0 1)"
    assert seat.state == (
        "its seat is on r0: the replica with the least given away (tokens given room: r0 100)"
    )
    assert request.state.startswith("its newest request went to r0: its seat is there (predicted: ")
    assert request.state.endswith(
        "it was held for 0.0 s before: it needed 400 tokens beside 600 of 1,000, with 1 before it "
        "in rank"
    )
