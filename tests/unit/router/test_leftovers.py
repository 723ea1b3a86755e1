"""Boxes that a former router, or a host's former service, left: which are given back at once."""

from __future__ import annotations

import pytest

from muster.types import EpisodeKey, Outcome, OutcomeLabel
from services.router import events as e
from tests.unit.router.test_machine import silent
from tests.unit.router.test_resume import record
from tests.unit.router.world import World, job

GOOD = OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", 1.0)


def found(
    box: str = "old", *, host: str = "h1", attempt: int = 1, former: int = 6, group: str = "j-00000"
) -> e.BoxesFound:
    living = e.Living(EpisodeKey("r", group, 0, attempt, 7), box, former)
    return e.BoxesFound(host, (living,))


def released(told: e.SiblingRestored, boxes: e.BoxesFound, *, hosts: int = 2) -> list[str]:
    """Of a router that takes over one sibling in that state."""
    world = World().on(e.Generate, silent).on(e.AcquireBox, silent)
    world.feed(job(size=1, max_turns=5), boxes)
    world.feed(e.GroupRestored("j-00000", "j", 0, (told,)))
    world.start(hosts=hosts).wait(1.0)  # once, however much follows
    return [c.box for c in world.sent(e.ReleaseBox)]


RESUMED = e.SiblingRestored(1, resume=record())
STARTED = e.SiblingRestored(1, started=True)


@pytest.mark.parametrize(
    ("told", "boxes"),
    [
        (RESUMED, found("half-rebuilt")),
        (RESUMED, found(host="h0")),
        (RESUMED, found(attempt=0)),
        (RESUMED, found(group="gone-00003")),
        (STARTED, found()),
        (e.SiblingRestored(1, GOOD, 1), found()),
        (e.SiblingRestored(1), found(former=7, group="gone-00003")),
    ],
    ids=[
        "another box",
        "another host",
        "older attempt",
        "over",
        "asks elsewhere",
        "has ended",
        "our own",
    ],
)
def test_a_box_that_nobody_goes_on_in_is_given_back_at_once(
    told: e.SiblingRestored, boxes: e.BoxesFound
) -> None:
    assert released(told, boxes) == [boxes.boxes[0].box]


@pytest.mark.parametrize(
    ("told", "boxes"),
    [
        (RESUMED, found()),
        (STARTED, found(host="h0")),
        (e.SiblingRestored(1), found(former=8, group="gone-00003")),
    ],
    ids=["its records name it", "its host is asked for one", "of a later owner"],
)
def test_a_box_that_is_wanted_is_left_alone(told: e.SiblingRestored, boxes: e.BoxesFound) -> None:
    assert released(told, boxes) == []


def test_it_is_given_back_under_todays_owner() -> None:
    world = World().feed(found(group="gone-00003")).start()
    assert [c.episode.owner_epoch for c in world.sent(e.ReleaseBox)] == [7]


def test_nothing_is_given_back_before_all_was_told() -> None:
    world = World().feed(found(group="gone-00003"))
    assert not world.sent(e.ReleaseBox)
