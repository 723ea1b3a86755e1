"""Set-ups that are made once, and boxes that stand ready: who gets which, and who gives way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from muster.types import EpisodeKey, Limits
from services.sandbox.events import (
    Adopted,
    Asked,
    BuildFailed,
    Built,
    Claimed,
    Dropped,
    EndBox,
    Ended,
    FoundDead,
    Handed,
    HandOver,
    Known,
    Released,
    Resized,
    RunSetup,
    Spoke,
    StartBox,
    Started,
    StartFailed,
    StartWarm,
    TellFailure,
    TellFormer,
    Ticked,
)
from services.sandbox.pool import BoxState, Pool, PoolRules
from services.sandbox.warm import Kind

RULES = PoolRules(
    boxes_max=6, starting_max=4, warm_max=2, warm_idle_s=50.0, building_max=1, adopt_s=20.0
)
KIND, OTHER = Kind("content", Limits()), Kind("other", Limits())


def key(group: int, epoch: int = 1) -> EpisodeKey:
    """The only sibling of a group, so that no other is expected."""
    return EpisodeKey("r", f"g{group}", 0, 1, epoch)


def sibling(number: int, group: str = "wide") -> EpisodeKey:
    return EpisodeKey("s", group, number, 1, 1)


def ask(ticket: int, kind: Kind = KIND, epoch: int = 1, deadline: float = 900.0) -> Asked:
    return Asked(ticket, key(ticket, epoch), deadline, kind)


@pytest.fixture
def pool() -> Pool:
    return Pool(RULES)


def warmed(rules: PoolRules = RULES) -> tuple[Pool, str]:
    """A pool in which a box of KIND stands ready, and nothing else."""
    pool = Pool(replace(rules, boxes_max=6))
    pool.handle(Known("content"), 0)
    pool.handle(ask(1), 0)
    [warm] = pool.handle(Started("box-1", 0.1), 0)
    assert isinstance(warm, StartWarm)
    pool.handle(Started(warm.box, 0.1), 0)
    pool.handle(Released("box-1"), 0)
    pool.handle(Ended("box-1"), 0)
    pool.handle(Resized(rules.boxes_max, rules.warm_max), 0)
    assert pool.states == {warm.box: BoxState.WARM}
    return pool, warm.box


def test_callers_of_one_content_wait_for_one_set_up(pool: Pool) -> None:
    assert pool.handle(ask(1), 0) == [RunSetup("box-1", KIND, 1)]
    assert pool.handle(ask(2), 0) == []
    assert pool.handle(Built("box-1"), 5) == [
        StartBox(1, "box-2", key(1)),
        StartBox(2, "box-3", key(2)),
    ]


def test_callers_of_another_content_do_not_wait_for_it(pool: Pool) -> None:
    pool.handle(Known("other"), 0)
    pool.handle(ask(1), 0)
    assert pool.handle(ask(2, OTHER), 0) == [StartBox(2, "box-2", key(2))]


def test_set_ups_at_once_are_bounded(pool: Pool) -> None:
    pool.handle(ask(1), 0)
    assert pool.handle(ask(2, OTHER), 0) == []
    told = pool.handle(Built("box-1"), 1)
    assert told == [StartBox(1, "box-2", key(1)), RunSetup("box-3", OTHER, 2)]


def test_the_failure_of_a_set_up_is_told_to_each_that_waits_and_not_remembered(pool: Pool) -> None:
    pool.handle(ask(1), 0)
    pool.handle(ask(2), 0)
    assert pool.handle(BuildFailed("box-1"), 1) == [
        TellFailure(1, "box-1"),
        TellFailure(2, "box-1"),
    ]
    assert pool.handle(ask(3), 2) == [RunSetup("box-2", KIND, 3)]


def test_a_snapshot_that_was_dropped_is_made_again(pool: Pool) -> None:
    pool.handle(Known("content"), 0)
    pool.handle(Dropped("content"), 1)
    assert pool.handle(ask(1), 2) == [RunSetup("box-1", KIND, 1)]


def test_no_box_of_a_dropped_snapshot_is_handed_over() -> None:
    pool, warm = warmed()
    assert pool.handle(Dropped("other"), 1) == []
    assert EndBox(warm, "its snapshot is gone") in pool.handle(Dropped("content"), 1)
    assert pool.handle(ask(2), 1) == [RunSetup("box-3", KIND, 2)]


def test_a_box_of_a_dropped_snapshot_that_starts_for_nobody_ends_with_its_start(pool: Pool) -> None:
    pool.handle(Known("content"), 0)
    pool.handle(ask(1), 0)
    [warm] = pool.handle(Started("box-1", 0.1), 0)
    assert isinstance(warm, StartWarm)
    pool.handle(Dropped("content"), 1)
    assert pool.handle(Started(warm.box, 0.1), 2) == [EndBox(warm.box, "its snapshot is gone")]


def test_a_kind_without_set_up_starts_at_once(pool: Pool) -> None:
    bare = Kind("bare", Limits(), set_up=False)
    assert pool.handle(ask(1, bare), 0) == [StartBox(1, "box-1", key(1))]


def test_a_set_up_takes_a_place() -> None:
    pool = Pool(PoolRules(boxes_max=1))
    assert pool.handle(ask(1), 0) == [RunSetup("box-1", KIND, 1)]
    pool.handle(ask(2, Kind("bare", Limits(), set_up=False)), 0)
    assert pool.handle(Built("box-1"), 1) == [StartBox(1, "box-2", key(1))]


def test_a_warm_box_is_handed_over_once() -> None:
    pool, warm = warmed()
    handed, more = pool.handle(ask(2), 1)
    assert handed == HandOver(2, warm, key(2))
    assert isinstance(more, StartWarm)  # for the next
    assert not isinstance(pool.refusal(key(2), warm), type(None))  # not before it was looked at
    pool.handle(Handed(warm), 1)
    assert pool.refusal(key(2), warm) is None
    assert warm not in {c.box for c in pool.handle(ask(3), 1) if isinstance(c, HandOver | StartBox)}


def test_a_warm_box_of_other_limits_is_not_taken() -> None:
    pool, _ = warmed()
    larger = Kind("content", Limits(pids=9))
    assert pool.handle(ask(2, larger), 1)[0] == StartBox(2, "box-3", key(2))


def test_a_dead_warm_box_ends_and_its_caller_is_served_first() -> None:
    pool, warm = warmed(PoolRules(boxes_max=1, warm_max=1))
    assert pool.handle(ask(2), 1) == [HandOver(2, warm, key(2))]
    assert pool.handle(ask(3), 1) == []
    assert pool.handle(FoundDead(warm), 2) == [EndBox(warm, "it did not answer")]
    assert pool.handle(Ended(warm), 3) == [StartBox(2, "box-3", key(2))]


def test_no_other_box_is_made_ready_at_once_when_one_is_found_dead() -> None:
    pool, warm = warmed()
    [_, other] = pool.handle(ask(2), 1)
    assert isinstance(other, StartWarm)
    pool.handle(Started(other.box, 0.1), 1)
    told = pool.handle(FoundDead(warm), 1)
    assert HandOver(2, other.box, key(2)) in told
    assert not [command for command in told if isinstance(command, StartWarm)]


def test_the_caller_of_a_dead_box_goes_on_under_its_newest_owner() -> None:
    pool, warm = warmed(PoolRules(boxes_max=1, warm_max=1))
    pool.handle(ask(2), 1)
    assert pool.handle(Spoke(key(2, epoch=2), warm), 1) == [TellFormer()]
    pool.handle(FoundDead(warm), 2)
    [started] = pool.handle(Ended(warm), 3)
    assert started == StartBox(2, "box-3", key(2, epoch=2))


def test_a_caller_that_left_meanwhile_gets_no_second_box() -> None:
    pool, warm = warmed(PoolRules(boxes_max=1, warm_max=1))
    pool.handle(ask(2), 1)
    pool.handle(Released(warm), 1)
    pool.handle(FoundDead(warm), 2)
    assert not [c for c in pool.handle(Ended(warm), 3) if isinstance(c, StartBox)]


def test_a_warm_box_gives_way_to_a_caller_of_another_kind() -> None:
    pool, warm = warmed(PoolRules(boxes_max=1, warm_max=1))
    bare = Kind("bare", Limits(), set_up=False)
    assert pool.handle(ask(2, bare), 1) == [EndBox(warm, "it gives way")]
    assert pool.handle(Ended(warm), 2) == [StartBox(2, "box-3", key(2))]


def test_no_more_warm_boxes_end_than_callers_lack_places() -> None:
    pool = Pool(PoolRules(boxes_max=3, warm_max=2, starting_max=4))
    pool.handle(Known("content"), 0)
    pool.handle(Asked(1, sibling(3), 900.0, KIND), 0)  # of a group of four
    for name in list(pool.states):
        pool.handle(Started(name, 0.1), 0)
    assert list(pool.states.values()).count(BoxState.WARM) == 2
    bare = Kind("bare", Limits(), set_up=False)
    ends = [c for c in pool.handle(ask(9, bare), 1) if isinstance(c, EndBox)]
    assert len(ends) == 1
    assert pool.handle(Ticked(), 1) == []


def test_the_siblings_of_a_group_are_made_before_they_ask(pool: Pool) -> None:
    pool.handle(Known("content"), 0)
    first = pool.handle(Asked(1, sibling(2), 900.0, KIND), 0)
    assert first[0] == StartBox(1, "box-1", sibling(2))
    assert [c.kind for c in first[1:] if isinstance(c, StartWarm)] == [KIND, KIND]


def test_a_caller_takes_the_box_that_is_coming_rather_than_one_more(pool: Pool) -> None:
    pool.handle(Known("content"), 0)
    pool.handle(Asked(1, sibling(2), 900.0, KIND), 0)
    assert not [c for c in pool.handle(ask(7), 0) if isinstance(c, StartBox)]
    assert HandOver(7, "box-2", key(7)) in pool.handle(Started("box-2", 0.1), 1)


def test_a_start_for_nobody_leaves_one_start_free() -> None:
    pool = Pool(PoolRules(boxes_max=9, starting_max=2, warm_max=8))
    pool.handle(Known("content"), 0)
    pool.handle(Asked(1, sibling(7), 900.0, KIND), 0)
    pool.handle(Started("box-1", 0.1), 0)
    assert list(pool.states.values()) == [BoxState.READY, BoxState.STARTING]


def test_an_unused_warm_box_ends_in_time() -> None:
    pool, warm = warmed()
    assert pool.handle(Ticked(), 50) == []
    assert pool.handle(Ticked(), 51) == [EndBox(warm, "nobody asked for it")]


def test_a_start_for_nobody_that_fails_is_not_tried_again_at_once(pool: Pool) -> None:
    pool.handle(Known("content"), 0)
    pool.handle(ask(1), 0)
    [warm] = pool.handle(Started("box-1", 0.1), 0)
    assert isinstance(warm, StartWarm)
    assert pool.handle(StartFailed(warm.box), 1) == []
    assert pool.handle(Ticked(), 5) == []
    assert [type(c) for c in pool.handle(Ticked(), 6)] == [StartWarm]


def test_a_warm_box_belongs_to_no_run() -> None:
    pool, warm = warmed()
    assert pool.living("r") == {}
    assert pool.handle(Claimed("r", 9), 1) == [TellFormer()]
    assert pool.states == {warm: BoxState.WARM}


def test_fewer_warm_boxes_are_allowed_from_now_on() -> None:
    pool, warm = warmed()
    assert pool.handle(Resized(6, 0), 1) == [EndBox(warm, "it gives way")]
    assert pool.handle(Ended(warm), 2) == []


def test_lower_capacity_ends_no_box_in_use_and_starts_none(pool: Pool) -> None:
    bare = Kind("bare", Limits(), set_up=False)
    for ticket in (1, 2, 3):
        pool.handle(ask(ticket, bare), 0)
        pool.handle(Started(f"box-{ticket}"), 0)
    assert not [c for c in pool.handle(Resized(2, 0), 1) if isinstance(c, EndBox)]
    assert pool.handle(ask(4, bare), 1) == []
    pool.handle(Released("box-1"), 2)
    assert pool.handle(Ended("box-1"), 3) == []
    assert pool.handle(Resized(3, 0), 4) == [StartBox(4, "box-4", key(4))]


def test_a_box_taken_over_lives_under_its_last_key_and_ends_unless_used(pool: Pool) -> None:
    pool.handle(Adopted("old-1", key(1)), 0)
    pool.handle(Adopted("old-2", key(2)), 0)
    assert pool.living("r") == {"old-1": key(1), "old-2": key(2)}
    pool.handle(Spoke(key(1), "old-1"), 19)
    assert pool.handle(Ticked(), 20) == []
    assert pool.handle(Ticked(), 21) == [EndBox("old-2", "taken over and untouched for 20 s")]
    assert pool.handle(Ticked(), 500) == []


def test_a_burst_of_many_kinds_makes_exactly_what_fits() -> None:
    """20 kinds of 25 callers each, and room for half."""
    pool = Pool(PoolRules(boxes_max=250, starting_max=8, waiting_max=500, warm_max=16))
    todo, made, most = [], 0, 0
    for number in range(500):
        kind = Kind(f"c{number % 20}", Limits())
        asked = Asked(number, sibling(number // 20, f"g{number % 20}"), 1e9, kind)
        todo += pool.handle(asked, 0)
        most = max(most, len(pool.states))
    while todo:
        command = todo.pop(0)
        if isinstance(command, RunSetup):
            todo += pool.handle(Built(command.box), 1)
        elif isinstance(command, StartBox | StartWarm):
            made += isinstance(command, StartBox)
            todo += pool.handle(Started(command.box, 0.01), 1)
        elif isinstance(command, HandOver):
            made += 1
            todo += pool.handle(Handed(command.box), 1)
        elif isinstance(command, EndBox):
            todo += pool.handle(Ended(command.box), 1)
        most = max(most, len(pool.states))
    assert (made, most, pool.waiting) == (250, 250, 250)
    assert set(pool.states.values()) == {BoxState.READY}


def test_a_warm_box_that_nobody_is_expected_to_ask_for_gives_way_to_one_that_is() -> None:
    """Long before it has been idle for too long: the task that it was made for is over."""
    pool, warm = warmed(replace(RULES, warm_max=1))
    pool.handle(Known("other"), 30)
    pool.handle(ask(2, OTHER), 30)
    assert pool.handle(Started("box-3", 0.1), 30.1) == [EndBox(warm, "others are asked for")]
    [started] = pool.handle(Ended(warm), 30.2)
    assert isinstance(started, StartWarm)
    assert started.kind == OTHER


def test_a_warm_box_that_will_be_asked_for_gives_way_to_none() -> None:
    pool, warm = warmed(replace(RULES, warm_max=1))
    pool.handle(Known("other"), 1)
    pool.handle(ask(2, OTHER), 1)
    pool.handle(Started("box-3", 0.1), 1.1)
    assert pool.states[warm] is BoxState.WARM
