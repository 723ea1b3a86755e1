"""The seconds that placement by predicted finish reckons with, added up by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.router.costs import Costs
from services.router.placements import (
    CacheAware,
    Choice,
    PredictedFinish,
    ReplicaView,
    StickyLeastLoaded,
    TurnRequest,
    placement_of,
)
from services.router.rules import RouterRules

COSTS = Costs(1.0, 1.0, 0.0, 0.1, 0.01, 1e-6)
POLICY = PredictedFinish(COSTS)
TURN = TurnRequest("e", "g", "", 4_000, 100)
BUSY = ReplicaView(
    "b", 2, 4, load_tokens=20_000, running_tokens=10_000, queued_tokens=6_000, cached_tokens=1_000,
    group_sessions=1,
)  # fmt: skip
# Prefill of 3,000: 4. What the turn adds to a step: 0.01 + 0.004. 100 steps of
# 0.1 + 0.02 + 0.01 + 0.014: 14.4. Two others wait for the prefill and for 100 × 0.014 each: 10.8.
# Before it, two prefills of 3,000 are under way for 4 of 18.4 s each: 2 × 4 × 4 / 18.4.
NOW = 4 + 14.4 + 10.8 + 2 * 16 / 18.4
# 3 of 5 decode at a time: beside 2.4 others of 24,000 tokens (a sibling will grow as much as this).
LATER = 8 * 100 * (0.1 + 0.024 + 0.6 * 0.024 + 0.014 + 2.4 * 0.014)


def seconds(replica: ReplicaView, request: TurnRequest = TURN) -> float:
    return POLICY.choose(request, (replica,)).terms[replica.id]


def test_a_turn_waits_delays_others_and_is_followed_by_eight_more() -> None:
    assert seconds(BUSY) == pytest.approx(NOW + LATER)


def test_slowness_counts_for_the_engine_and_not_for_the_way_to_the_box() -> None:
    away = replace(BUSY, slow=2.0, distance_s=0.5)
    assert seconds(away) == pytest.approx(2 * (NOW + LATER) + 0.5)


def test_at_home_a_conversation_is_not_beside_itself() -> None:
    """Of four conversations and 20,000 tokens there, one and 4,000 are its own; no sibling."""
    later = 8 * 100 * (0.1 + 0.018 + 0.6 * 0.016 + 0.014 + 1.8 * 0.014)
    assert seconds(BUSY, replace(TURN, home="b")) == pytest.approx(NOW + later)


def test_more_requests_than_conversations_all_decode() -> None:
    odd = replace(BUSY, in_flight=9)
    later = 8 * 100 * (0.1 + 0.04 + 0.024 + 0.014 + 4 * 0.014)
    step = 0.1 + 0.09 + 0.01 + 0.014
    now = 4 + 100 * step + 9 * (4 + 1.4) + 9 * 1.666**2 / (1.666 + 100 * step)
    assert seconds(odd) == pytest.approx(now + later)


def test_what_overflows_is_computed_again_by_its_share() -> None:
    """24,000 tokens where 0.97 × 20,000 may lie: 4,600 of 24,000, at 5 s for the whole context."""
    assert seconds(replace(BUSY, credit_tokens=20_000)) == pytest.approx(
        NOW + LATER + 5 * 4_600 / 24_000
    )


def test_at_home_the_conversation_lies_in_the_cache_already() -> None:
    here = replace(TURN, home="b")
    more = seconds(replace(BUSY, credit_tokens=20_000), here) - seconds(BUSY, here)
    assert more == pytest.approx(5 * 600 / 20_000)


def test_seconds_that_nobody_would_notice_move_nobody() -> None:
    """Twice as long at home, and a tenth of a second."""
    home = ReplicaView("a", 0, 1, load_tokens=1_000, cached_tokens=900, slow=2.0)
    policy = PredictedFinish(Costs())
    choice = policy.choose(
        TurnRequest("e", "g", "a", 1_000, 1), (home, ReplicaView("b", 0, 0, cached_tokens=100))
    )
    assert choice.terms["a"] > 1.25 * choice.terms["b"]
    assert choice.reason == "sticky"


def test_the_policy_reckons_with_the_costs_the_fill_and_the_longest_reply_of_the_rules() -> None:
    rules = RouterRules(
        "r", 1, placement="predicted_finish", hold_fill=0.6, turn_tokens_max=64, prefill_base_s=1,
        prefill_linear_s=1, prefill_square_s=0, decode_base_s=0.1, decode_request_s=0.01,
        decode_context_s=1e-6,
    )  # fmt: skip
    request, fleet = replace(TURN, expected_tokens=0), (replace(BUSY, credit_tokens=20_000),)
    told: Choice = placement_of(rules).choose(request, fleet)
    assert told == PredictedFinish(COSTS, 0.6, 64).choose(request, fleet)
    assert told.terms != PredictedFinish(COSTS, 0.97, 64).choose(request, fleet).terms


def test_of_equally_cached_replicas_the_less_busy_one_is_taken() -> None:
    fleet = (ReplicaView("a", 3, 3, cached_tokens=900), ReplicaView("b", 1, 1, cached_tokens=900))
    assert CacheAware().choose(TurnRequest("e", "g", "", 1_000), fleet).replica == "b"


def test_of_equally_busy_replicas_the_one_with_fewer_conversations_is_the_idlest() -> None:
    fleet = (ReplicaView("a", 1, 5), ReplicaView("b", 1, 2))
    assert StickyLeastLoaded().choose(TurnRequest("e", "g", "", 1_000), fleet).replica == "b"


def test_an_idle_replica_counts_as_one_request_when_loads_are_compared() -> None:
    """One request at home is not twice as many as none elsewhere."""
    fleet = (ReplicaView("a", 1, 1), ReplicaView("b", 0, 0))
    assert StickyLeastLoaded(1, 2.0).choose(TurnRequest("e", "g", "a", 1), fleet).reason == "sticky"
