"""Which box may exist: order, bounds, epochs, idleness."""

from __future__ import annotations

import pytest

from muster.errors import Fenced, NotFound
from muster.types import EpisodeKey
from services.sandbox.events import (
    Asked,
    Claimed,
    EndBox,
    Ended,
    GaveUp,
    RefuseTicket,
    Released,
    Spoke,
    StartBox,
    Started,
    StartFailed,
    TellFormer,
    Ticked,
)
from services.sandbox.owners import Owners
from services.sandbox.pool import Pool, PoolRules

RULES = PoolRules(boxes_max=3, starting_max=2, waiting_max=2, idle_s=100.0, adopt_s=20.0)


def key(sibling: int = 0, epoch: int = 1, run: str = "r") -> EpisodeKey:
    return EpisodeKey(run, "g", sibling, 1, epoch)


def ask(ticket: int, epoch: int = 1, deadline: float = 50.0, run: str = "r") -> Asked:
    return Asked(ticket, key(ticket, epoch, run), deadline)


@pytest.fixture
def pool() -> Pool:
    return Pool(RULES)


def test_starts_are_bounded_and_callers_served_in_order(pool: Pool) -> None:
    assert pool.handle(ask(1), 0) == [StartBox(1, "box-1", key(1))]
    assert pool.handle(ask(2), 0) == [StartBox(2, "box-2", key(2))]
    assert pool.handle(ask(3), 0) == []
    assert pool.handle(Started("box-1"), 1) == [StartBox(3, "box-3", key(3))]


def test_boxes_are_bounded_until_one_is_gone(pool: Pool) -> None:
    for ticket in (1, 2, 3):
        pool.handle(ask(ticket), 0)
        pool.handle(Started(f"box-{ticket}"), 0)
    assert pool.handle(ask(4), 0) == []
    assert pool.handle(Released("box-2"), 1) == [EndBox("box-2", "released")]
    assert pool.handle(Released("box-2"), 1) == []
    assert pool.handle(Ended("box-2"), 2) == [StartBox(4, "box-4", key(4))]


def test_a_failed_start_frees_its_place(pool: Pool) -> None:
    pool.handle(ask(1), 0)
    pool.handle(ask(2), 0)
    pool.handle(ask(3), 0)
    assert pool.handle(StartFailed("box-1"), 1) == [StartBox(3, "box-3", key(3))]


def test_the_queue_is_bounded(pool: Pool) -> None:
    for ticket in (1, 2, 3, 4):
        pool.handle(ask(ticket), 0)
    [refusal] = pool.handle(ask(5), 0)
    assert isinstance(refusal, RefuseTicket)
    assert not refusal.fenced
    assert pool.waiting == 2


def test_nobody_waits_past_the_deadline(pool: Pool) -> None:
    for ticket in (1, 2, 3):
        pool.handle(ask(ticket, deadline=10.0), 0)
    assert pool.handle(Ticked(), 9.9) == []
    [refusal] = pool.handle(Ticked(), 10.0)
    assert isinstance(refusal, RefuseTicket)
    assert refusal.ticket == 3


def test_an_attempt_that_asks_again_after_its_deadline_stands_where_it_stood(pool: Pool) -> None:
    """More episodes than boxes: each call comes to its deadline while others are launched."""
    for ticket in (1, 2, 3):
        pool.handle(ask(ticket), 0)
        pool.handle(Started(f"box-{ticket}"), 0)
    pool.handle(ask(4, deadline=60.0), 0)
    pool.handle(Ticked(), 60.0)
    pool.handle(Asked(5, key(5), 130.0, since=60.2), 60.2)
    pool.handle(Asked(6, key(4), 120.0, since=0.5), 60.5)
    pool.handle(Released("box-2"), 61)
    assert pool.handle(Ended("box-2"), 61) == [StartBox(6, "box-4", key(4))]
    pool.handle(Released("box-1"), 62)
    assert pool.handle(Ended("box-1"), 62) == [StartBox(5, "box-5", key(5))]


def test_a_caller_that_left_is_not_served(pool: Pool) -> None:
    for ticket in (1, 2, 3):
        pool.handle(ask(ticket), 0)
    pool.handle(GaveUp(3), 0)
    assert pool.handle(Started("box-1"), 1) == []


def test_a_newer_epoch_refuses_older_callers_and_leaves_the_boxes(pool: Pool) -> None:
    pool.handle(ask(1), 0)
    pool.handle(ask(2), 0)
    pool.handle(Started("box-1"), 0)
    pool.handle(ask(3), 0)
    pool.handle(ask(4), 0)
    commands = pool.handle(Spoke(key(9, epoch=2)), 1)
    refusal = RefuseTicket(4, True, "a newer owner epoch has spoken")
    assert commands == [TellFormer(), refusal]
    assert pool.handle(Started("box-2"), 2) == []
    [late] = pool.handle(ask(5, epoch=1), 3)
    assert isinstance(late, RefuseTicket)
    assert late.fenced


def test_a_claim_is_a_first_word_too(pool: Pool) -> None:
    pool.handle(ask(1), 0)
    pool.handle(Started("box-1"), 0)
    assert pool.handle(Claimed("r", 2), 1) == [TellFormer()]
    assert isinstance(pool.refusal(key(1), "box-1"), Fenced)
    assert pool.living("r") == {"box-1": key(1)}
    assert pool.living("other") == {}


def test_a_call_of_the_newer_owner_makes_a_box_its_own(pool: Pool) -> None:
    pool.handle(ask(1), 0)
    pool.handle(Started("box-1"), 0)
    pool.handle(Spoke(key(1, epoch=2), "box-1"), 1)
    assert pool.refusal(key(1, epoch=2), "box-1") is None
    assert pool.living("r") == {"box-1": key(1, epoch=2)}


def test_boxes_that_the_newer_owner_does_not_use_end_in_time(pool: Pool) -> None:
    for ticket in (1, 2):
        pool.handle(ask(ticket), 0)
        pool.handle(Started(f"box-{ticket}"), 0)
    pool.handle(Claimed("r", 2), 10)
    pool.handle(Spoke(key(1, epoch=2), "box-1"), 12)
    assert pool.handle(Ticked(), 30) == []
    assert pool.handle(Ticked(), 31) == [EndBox("box-2", "owner epoch 2 has no use for it")]


def test_a_former_owner_keeps_no_box_alive(pool: Pool) -> None:
    pool.handle(ask(1), 0)
    pool.handle(Started("box-1"), 0)
    pool.handle(Claimed("r", 2), 10)
    pool.handle(Spoke(key(1), "box-1"), 29)
    assert pool.handle(Ticked(), 31) == [EndBox("box-1", "owner epoch 2 has no use for it")]


def test_epochs_of_other_runs_do_not_matter(pool: Pool) -> None:
    pool.handle(ask(1), 0)
    pool.handle(Started("box-1"), 0)
    assert pool.handle(Spoke(key(0, epoch=7, run="other")), 1) == []
    assert pool.refusal(key(1), "box-1") is None


def test_calls_are_refused_for_the_right_reason(pool: Pool) -> None:
    pool.handle(ask(1), 0)
    assert isinstance(pool.refusal(key(1), "box-1"), NotFound)  # still starting
    pool.handle(Started("box-1"), 0)
    assert pool.refusal(key(1), "box-1") is None
    assert isinstance(pool.refusal(key(2), "box-1"), NotFound)  # another attempt's
    pool.handle(Spoke(key(1, epoch=2)), 0)
    assert isinstance(pool.refusal(key(1), "box-1"), Fenced)


def test_an_untouched_box_ends(pool: Pool) -> None:
    pool.handle(ask(1), 0)
    pool.handle(Started("box-1"), 0)
    pool.handle(Spoke(key(1), "box-1"), 60)
    assert pool.handle(Ticked(), 160) == []
    assert pool.handle(Ticked(), 161) == [EndBox("box-1", "untouched for 100 s")]


def test_epochs_of_many_runs_are_remembered_within_bounds() -> None:
    owners = Owners(runs_max=3)
    for number in range(9):
        owners.hear(f"run-{number}", 7, 0.0, busy={"run-0"})
    known = [number for number in range(9) if owners.fence(f"run-{number}", 6)]
    assert known == [0, 7, 8]
