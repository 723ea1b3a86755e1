"""What runs where: counts that follow each request, and caches that are known to be gone."""

from __future__ import annotations

from services.router.loads import Loads
from services.router.placements import Mark, ReplicaView, TurnRequest
from services.router.rules import RouterRules

MARKS: tuple[Mark, ...] = ((11, 128), (12, 256))


def fleet(*replicas: str) -> Loads:
    loads = Loads(RouterRules("r", 1))
    loads.listed(frozenset(replicas))
    return loads


def turn(context: int = 300, episode: str = "e") -> TurnRequest:
    return TurnRequest(episode, "g", "", context, marks=MARKS)


def view(loads: Loads, replica: str = "a", request: TurnRequest | None = None) -> ReplicaView:
    told = loads.views(request or turn(episode="other"), lambda _: False, lambda _: 1.0)
    return next(one for one in told if one.id == replica)


def test_what_is_not_cached_of_a_request_is_queued_until_its_reply() -> None:
    loads = fleet("a")
    loads.sent(turn(), "a")
    loads.ended("e")
    loads.sent(turn(), "a")  # 256 of 300 tokens lie there now
    assert view(loads).queued_tokens == 44
    loads.ended("e")
    now = view(loads)
    assert (now.queued_tokens, now.running_tokens, now.in_flight) == (0, 0, 0)


def test_a_conversation_counts_at_home_with_the_context_of_its_newest_turn() -> None:
    loads = fleet("a")
    for context in (300, 500, 900):
        loads.sent(turn(context), "a")
        loads.ended("e")
        assert view(loads).load_tokens == context
    loads.session_over("e")
    now = view(loads)
    assert (now.load_tokens, now.sessions, now.group_sessions) == (0, 0, 0)


def test_no_more_of_a_context_is_cached_than_it_has() -> None:
    loads = fleet("a")
    assert loads.sent(turn(), "a", kept=5_000) == 300
    assert view(loads).queued_tokens == 0


def test_what_the_index_knows_goes_before_what_a_former_router_left() -> None:
    loads = fleet("a")
    loads.sent(turn(), "a")
    loads.ended("e")
    assert loads.sent(turn(), "a", kept=300) == 256


def test_a_cache_is_empty_after_its_replica_was_lost() -> None:
    loads = fleet("a")
    loads.sent(turn(), "a")
    loads.lost("a")
    assert loads.cached("a", MARKS) == 0


def test_a_replica_that_comes_back_has_an_empty_cache() -> None:
    loads = fleet("a", "b")
    loads.sent(turn(), "a")
    loads.listed(frozenset("b"))
    loads.listed(frozenset("ab"))
    assert loads.cached("a", MARKS) == 0
    assert view(loads) == ReplicaView("a", 0, 0)


def test_blocks_of_another_size_are_another_cache() -> None:
    loads = fleet("a")
    assert loads.told("a", "life-1", 16, 0) == (False, False)
    loads.sent(turn(), "a")
    assert loads.told("a", "life-1", 32, 0) == (True, True)
    assert loads.cached("a", MARKS) == 0


def test_weights_that_a_replica_serves_already_empty_nothing_when_they_are_published() -> None:
    loads = fleet("a", "b")
    loads.told("a", "life-1", 16, 1)
    loads.told("b", "life-1", 16, 0)
    assert loads.published(1) == ["b"]
