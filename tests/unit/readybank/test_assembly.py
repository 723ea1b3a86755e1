"""A group from events in any order: what completes it, what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from muster.types import Fate, OutcomeLabel
from services.readybank.assembly import CLOSED, DUPLICATE, NO_SIBLING, OLDER, GroupAssembly
from services.readybank.events import GroupOpened
from sim.builders import INFRA, attempt, key, opened, scored, turn

REPAIRS = 2


def test_a_group_is_complete_whatever_the_order_of_its_events() -> None:
    events, label = attempt(key("g", 0), scored(1.0), turns=2)
    for order in itertools.permutations([opened("g", 1), *events, label]):
        group = GroupAssembly("g")
        for number, event in enumerate(order):
            assert group.missing(REPAIRS), f"complete after {number} of {order}"
            assert not _take(group, event)
        assert not group.missing(REPAIRS)


def _take(group: GroupAssembly, event: Any) -> str:
    return group.open(event) if isinstance(event, GroupOpened) else group.take(event)


def _whole(number: int, *attempts: tuple[int, OutcomeLabel]) -> GroupAssembly:
    group = GroupAssembly("g")
    group.open(opened("g", 1))
    for which, label in attempts:
        events, said = attempt(key("g", number, which), label)
        for event in [*events, said]:
            _take(group, event)
    return group


@pytest.mark.parametrize(
    ("attempts", "missing"),
    [
        ([(0, scored(0.0))], ""),
        ([(0, INFRA)], "sibling 0 attempt 0: its repair"),
        ([(0, INFRA), (1, scored(1.0))], ""),
        ([(2, INFRA)], ""),  # repairs are exhausted: final
        ([(3, INFRA)], ""),  # a router that restarted counts on
    ],
)
def test_an_invalid_label_waits_for_its_repair_until_there_is_none(
    attempts: list[tuple[int, OutcomeLabel]], missing: str
) -> None:
    assert _whole(0, *attempts).missing(REPAIRS) == missing


def test_a_newer_attempt_takes_the_place_of_a_finished_one() -> None:
    group = _whole(0, (0, scored(1.0)))
    assert group.take(turn(key("g", 0, 1), 0)) == ""
    assert group.missing(REPAIRS) == "sibling 0 attempt 1: its end"


def test_what_does_not_count_is_refused_by_name() -> None:
    group = _whole(0, (1, scored(1.0)))
    assert group.open(opened("g", 1)) == DUPLICATE
    assert group.take(turn(key("g", 0, 1), 0)) == DUPLICATE
    assert group.take(turn(key("g", 0, 0), 0)) == OLDER
    assert group.take(turn(key("g", 1, 0), 0)) == NO_SIBLING
    assert group.take(turn(key("g", -1, 0), 0)) == NO_SIBLING
    group.pin((1,))
    assert group.take(turn(key("g", 0, 2), 0)) == CLOSED
    group.close(Fate.FILTERED)
    assert group.take(turn(key("g", 0, 1), 5)) == CLOSED


def test_a_pinned_group_takes_its_chosen_attempts_only() -> None:
    """At start a batch is known before the events of its groups are read."""
    group = GroupAssembly("g")
    group.pin((1,))
    for number in (0, 1, 2):
        events, said = attempt(key("g", 0, number), scored(0.0))
        for event in [*events, said]:
            _take(group, event)
    group.open(opened("g", 1))
    assert [s.attempt for s in group.leased().siblings] == [1]


def test_payloads_are_in_turn_order_and_only_of_valid_attempts() -> None:
    group = GroupAssembly("g")
    group.open(opened("g", 2))
    for number, label in enumerate((scored(1.0), INFRA)):
        events, said = attempt(key("g", number, 2), label, turns=3)
        for event in [said, *reversed(events)]:
            _take(group, event)
    good, bad = group.leased().siblings
    assert good.payload_keys == ("p:g.0.2.0", "p:g.0.2.1", "p:g.0.2.2")
    assert bad.payload_keys == ()


def test_an_attempt_beside_the_pinned_one_is_dropped() -> None:
    """A batch taken back from a checkpoint names the attempt that was trained."""
    group = _whole(0, (0, scored(1.0)), (1, scored(0.0)))
    group.pin((0,))
    assert group.missing(REPAIRS) == "sibling 0"
