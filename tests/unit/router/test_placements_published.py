"""Golden decisions of the placement policies that others published.

One story for all: three replicas, twelve turns of four conversations, loads and caches as each
row says. A policy's trace is the sequence of its choices.
"""

from __future__ import annotations

import pytest

from services.router.placements import (
    NAMES,
    CacheAware,
    ConsistentHash,
    LeastLoaded,
    OverlapCost,
    Placement,
    ReplicaView,
    RoundRobin,
    StickyLeastLoaded,
    TurnRequest,
    placement_of,
)
from services.router.rules import RouterRules

IDS = ("a", "b", "c")
# episode, home, context; then per replica: requests in flight, queued tokens, contexts in flight
# and cached tokens of this context
STORY = [
    ("e1", "", 3_000, (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)),
    ("e2", "", 3_000, (1, 0, 0), (3_000, 0, 0), (3_000, 0, 0), (3_000, 0, 0)),
    ("e3", "", 3_000, (1, 1, 0), (3_000, 1_200, 0), (3_000, 3_000, 0), (0, 1_800, 0)),
    ("e1", "a", 4_000, (9, 1, 2), (9_000, 900, 1_800), (60_000, 4_000, 8_000), (3_200, 1_800, 0)),
    ("e1", "a", 4_000, (8, 1, 2), (9_000, 900, 1_800), (60_000, 4_000, 8_000), (3_200, 1_800, 0)),
    ("e2", "b", 9_000, (9, 20, 12), (0, 0, 0), (90_000, 200_000, 120_000), (0, 8_000, 0)),
    ("e2", "b", 9_000, (9, 41, 12), (0, 0, 0), (90_000, 400_000, 120_000), (0, 8_000, 0)),
    ("e2", "b", 9_000, (9, 42, 12), (0, 0, 0), (90_000, 400_000, 120_000), (0, 8_000, 0)),
    ("e4", "gone", 9_000, (3, 2, 1), (0, 0, 0), (9_000, 6_000, 5_000), (4_500, 0, 0)),
    ("e4", "gone", 9_000, (3, 2, 1), (0, 0, 0), (9_000, 6_000, 5_000), (4_501, 0, 0)),
    ("e3", "c", 9_000, (400, 410, 439), (0, 0, 0), (0, 0, 0), (0, 0, 8_000)),
    ("e3", "c", 9_000, (100, 110, 133), (0, 0, 0), (0, 0, 0), (0, 0, 8_000)),
]


def trace(policy: Placement) -> list[str]:
    told = []
    for episode, home, context, flights, queued, contexts, cached in STORY:
        fleet = tuple(
            ReplicaView(
                id=id_,
                in_flight=flights[n],
                sessions=flights[n],
                queued_tokens=queued[n],
                running_tokens=contexts[n],
                cached_tokens=cached[n],
            )
            for n, id_ in enumerate(IDS)
        )
        choice = policy.choose(TurnRequest(episode, episode[:1], home, context), fleet)
        told.append(f"{choice.replica} {choice.reason}")
    return told


def test_round_robin_takes_each_in_turn() -> None:
    assert trace(RoundRobin()) == ["a next", "b next", "c next"] * 4


def test_least_loaded_takes_the_fewest_in_flight_whatever_is_cached() -> None:
    assert [t[0] for t in trace(LeastLoaded())] == list("abcbbaaaccaa")


def test_consistent_hash_keeps_each_episode_on_one_replica_whatever_the_load() -> None:
    assert [t[0] for t in trace(ConsistentHash())] == list("accaacccbbcc")


def test_cache_aware_follows_the_cache_over_a_half_until_the_fleet_is_out_of_balance() -> None:
    assert trace(CacheAware()) == [
        "a least_loaded",
        "a cached",
        "b cached",
        "a cached",
        "a cached",
        "b cached",
        "b cached",  # 41 against 9: 32 more are still in balance
        "a out_of_balance",  # 33 more, and over 1.1 times as many
        "c least_loaded",  # just a half is not over a half
        "a cached",
        "c cached",  # 39 more, and not 1.1 times as many
        "a out_of_balance",
    ]


def test_sticky_least_loaded_moves_at_eight_more_and_twice_as_many() -> None:
    assert trace(StickyLeastLoaded()) == [
        "a least_loaded",
        "b least_loaded",
        "c least_loaded",
        "b moved",  # 9 against 1
        "a sticky",  # 8 against 1: seven more
        "a moved",
        "a moved",
        "a moved",
        "c rehomed",
        "c rehomed",
        "c sticky",  # 39 more, and not twice as many
        "c sticky",
    ]


def test_overlap_cost_weighs_blocks_to_prefill_against_blocks_in_decode() -> None:
    assert [t[0] for t in trace(OverlapCost())] == list("abcbbaaaaacc")


def test_overlap_cost_counts_blocks_of_sixteen_tokens() -> None:
    fleet = (
        ReplicaView("a", 1, 1, queued_tokens=160, running_tokens=320, cached_tokens=80),
        ReplicaView("b", 0, 0, cached_tokens=9_999),
    )
    choice = OverlapCost().choose(TurnRequest("e", "g", "", 800), fleet)
    assert choice.terms == {"a": (160 + 800 - 80 + 320 + 800) / 16, "b": 800 / 16}


@pytest.mark.parametrize("name", NAMES)
def test_each_prefers_those_that_are_well_and_takes_a_suspect_before_none(name: str) -> None:
    well = ReplicaView("b", 50, 50, running_tokens=10_000, queued_tokens=10_000)
    suspect = ReplicaView("a", 0, 0, suspect=True, cached_tokens=900)
    request = TurnRequest("e", "g", "a", 1_000)
    policy = placement_of(RouterRules("r", 1, placement=name))
    assert policy.choose(request, (suspect, well)).replica == "b"
    assert policy.choose(request, (suspect,)).replica == "a"
    assert policy.choose(request, ()).reason == "no_replica"


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"consistent_hash"}))
def test_equal_replicas_are_told_apart_by_their_ids(name: str) -> None:
    policy = placement_of(RouterRules("r", 1, placement=name))
    fleet = tuple(ReplicaView(id_, 1, 1) for id_ in "cab")
    chosen = policy.choose(TurnRequest("episode-3", "g", "", 1_000), fleet).replica
    assert chosen == "a"


def test_a_ring_moves_only_the_episodes_of_the_replica_that_left() -> None:
    policy = ConsistentHash()
    requests = [TurnRequest(f"e{n}", "g", "", 100) for n in range(300)]
    three = tuple(ReplicaView(id_, 0, 0) for id_ in "abc")
    before = [policy.choose(r, three).replica for r in requests]
    after = [policy.choose(r, three[:2]).replica for r in requests]
    assert all(now == then for now, then in zip(after, before, strict=True) if then != "c")
    assert min(before.count(id_) for id_ in "abc") > 60


def test_the_sticky_bounds_are_those_of_the_rules() -> None:
    rules = RouterRules("r", 1, move_margin=2, move_ratio=1.0)
    fleet = (ReplicaView("a", 2, 0), ReplicaView("b", 0, 0))
    assert placement_of(rules).choose(TurnRequest("e", "g", "a", 0), fleet).reason == "moved"
