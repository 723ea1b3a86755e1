"""What the router's loads tell the prefix index."""

from __future__ import annotations

from muster.types import EpisodeKey, FinishReason
from services.router.events import Generated
from services.router.loads import Loads
from services.router.placements import Mark, TurnRequest
from services.router.rules import RouterRules

KEY = EpisodeKey("r", "g", 0, 0, 1)
PROMPT: tuple[Mark, ...] = ((11, 128), (12, 256))
BOUNDARY: Mark = (21, 512)


def asked_and_answered(published: int, answered_by: int) -> Loads:
    """A turn is sent under version 0; `published` comes; the reply is of `answered_by`."""
    loads = Loads(RouterRules("r", 1))
    loads.listed(frozenset({"a"}))
    loads.sent(TurnRequest(KEY.id, "g", "", 300, marks=PROMPT), "a")
    loads.published(published)
    asked = loads.ended(KEY.id)
    assert asked is not None
    reply = Generated(
        KEY, 0, "", FinishReason.STOP, 300, 250, 0.0, 0.0, 0.0, 1.0,
        version=answered_by, boundary=BOUNDARY[0], boundary_tokens=BOUNDARY[1],
    )  # fmt: skip
    loads.replied(asked, reply)
    return loads


def test_a_reply_leaves_its_context_in_the_cache() -> None:
    assert asked_and_answered(0, 0).cached("a", (*PROMPT, BOUNDARY)) == 512


def test_one_that_was_prefilled_again_under_new_weights_does_too() -> None:
    assert asked_and_answered(1, 1).cached("a", (*PROMPT, BOUNDARY)) == 512


def test_one_of_former_weights_leaves_nothing() -> None:
    assert asked_and_answered(1, 0).cached("a", (*PROMPT, BOUNDARY)) == 0


def test_a_cache_that_was_not_found_tells_that_older_ones_are_gone_too() -> None:
    loads = Loads(RouterRules("r", 1))
    loads.listed(frozenset({"a"}))
    old: tuple[Mark, ...] = ((91, 4_096),)
    loads.sent(TurnRequest("old", "h", "", 4_096, marks=old), "a")
    turns = ((*PROMPT, BOUNDARY), (*PROMPT, BOUNDARY, (22, 1_024)))
    for marks in turns:
        loads.ended(KEY.id)
        loads.sent(TurnRequest(KEY.id, "g", "", marks[-1][1], marks=marks), "a")
    asked = loads.ended(KEY.id)
    assert asked is not None
    reply = Generated(
        KEY, 1, "", FinishReason.STOP, 1_024, 9, 0.0, 0.0, 0.0, 1.0, cached_tokens=0, version=0
    )
    loads.replied(asked, reply)
    assert loads.cached("a", old) == 0
    assert loads.cached("a", turns[-1]) == 1_024  # just computed again
