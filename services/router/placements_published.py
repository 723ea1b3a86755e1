"""The placement policies that others published, with their constants.

Owns: round robin, least loaded, consistent hash, cache-aware, sticky least-loaded, overlap cost;
each names its source. Promise: pure and the same for the same calls; ties go to the id; a suspect
replica serves only when there is no other. Does not cover: the policy by predicted finish
(placements_finish.py), the choice by name (placements.py).

`terms` of a choice hold what the policy itself compares: requests, tokens or blocks.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right

from services.router.placements_view import Choice, Fleet, ReplicaView, TurnRequest, none, willing


def _idlest(fleet: Fleet) -> ReplicaView:
    return min(fleet, key=lambda r: (r.in_flight, r.sessions, r.id))


def _in_flight(fleet: Fleet) -> dict[str, float]:
    return {r.id: float(r.in_flight) for r in fleet}


class RoundRobin:
    """Each in turn; knows nothing of caches and load.

    Source: the `round_robin` policy of vllm-project/router: a counter over the healthy workers.
    """

    def __init__(self) -> None:
        self._count = 0

    def choose(self, request: TurnRequest, fleet: Fleet) -> Choice:
        able = willing(fleet)
        if not able:
            return none()
        chosen = sorted(r.id for r in able)[self._count % len(able)]
        self._count += 1
        return Choice(chosen, "next", _in_flight(able))


class LeastLoaded:
    """The fewest requests in flight, ties to the id; knows nothing of caches and conversations."""

    def choose(self, request: TurnRequest, fleet: Fleet) -> Choice:
        able = willing(fleet)
        if not able:
            return none()
        chosen = min(able, key=lambda r: (r.in_flight, r.id))
        return Choice(chosen.id, "least_loaded", _in_flight(able))


class ConsistentHash:
    """The next replica on a ring behind the hash of the episode; knows nothing of load.

    Source: `consistent_hash` of vllm-project/router: 160 virtual nodes per worker, keyed by the
    session. The hash is another (blake2b), so single decisions differ from theirs.
    """

    _VIRTUAL_NODES = 160

    def __init__(self) -> None:
        self._ids: tuple[str, ...] = ()
        self._points: list[int] = []
        self._owners: list[str] = []

    def choose(self, request: TurnRequest, fleet: Fleet) -> Choice:
        able = willing(fleet)
        if not able:
            return none()
        ids = tuple(sorted(r.id for r in able))
        if ids != self._ids:
            self._build(ids)
        at = bisect_right(self._points, _hash(request.episode)) % len(self._points)
        return Choice(self._owners[at], "hashed", _in_flight(able))

    def _build(self, ids: tuple[str, ...]) -> None:
        nodes = ((_hash(f"{id_}:{n}"), id_) for id_ in ids for n in range(self._VIRTUAL_NODES))
        ring = sorted(nodes)
        self._ids = ids
        self._points = [point for point, _ in ring]
        self._owners = [owner for _, owner in ring]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class CacheAware:
    """The longest cached prefix when it is more than half, unless the fleet is out of balance.

    Source: `cache_aware` of vllm-project/router: out of balance when the busiest has over 32
    requests more than the idlest and over 1.1 times as many: then the shortest queue; else the
    best match when it covers over 0.5 of the request; else the least load.
    """

    def __init__(self, threshold: float = 0.5, margin: int = 32, ratio: float = 1.1):
        self._threshold, self._margin, self._ratio = threshold, margin, ratio

    def choose(self, request: TurnRequest, fleet: Fleet) -> Choice:
        able = willing(fleet)
        if not able:
            return none()
        idlest = _idlest(able)
        busiest = max(r.in_flight for r in able)
        gap = busiest - idlest.in_flight
        if gap > self._margin and busiest > self._ratio * idlest.in_flight:
            return Choice(idlest.id, "out_of_balance", _in_flight(able))
        best = min(able, key=lambda r: (-r.cached_tokens, r.in_flight, r.id))
        terms = {r.id: float(r.cached_tokens) for r in able}
        if best.cached_tokens > self._threshold * request.context_tokens:
            return Choice(best.id, "cached", terms)
        return Choice(idlest.id, "least_loaded", terms)


class StickyLeastLoaded:
    """A conversation stays until its home is busier than the idlest by `margin` and by `ratio`.

    Source: `sticky_table` of vllm-project/router: 8 requests and 2 times. Its third condition
    (only bodies up to 32 KiB move) is left out, as in the loops that took the policy over.
    """

    def __init__(self, margin: int = 8, ratio: float = 2.0):
        self._margin, self._ratio = margin, ratio

    def choose(self, request: TurnRequest, fleet: Fleet) -> Choice:
        able = willing(fleet)
        if not able:
            return none()
        terms = _in_flight(able)
        idlest = _idlest(able)
        home = next((r for r in able if r.id == request.home), None)
        if home is None:
            return Choice(idlest.id, "rehomed" if request.home else "least_loaded", terms)
        gap = home.in_flight - idlest.in_flight
        if gap >= self._margin and home.in_flight >= self._ratio * max(idlest.in_flight, 1):
            return Choice(idlest.id, "moved", terms)
        return Choice(home.id, "sticky", terms)


class OverlapCost:
    """The least of blocks to prefill plus blocks in decode.

    Source: the KV router of ai-dynamo/dynamo: scale 1 · max(0, prefill blocks − credit 1 ·
    overlap) + decode blocks, both as they would be with the request there; temperature 0, 16
    tokens a block. Theirs hears when a prefill ends; this router only when the reply came, so
    a request counts as prefill for as long as it runs.
    """

    _BLOCK_TOKENS = 16
    _SCALE = 1.0
    _CREDIT = 1.0

    def choose(self, request: TurnRequest, fleet: Fleet) -> Choice:
        able = willing(fleet)
        if not able:
            return none()
        terms = {r.id: self._cost(request, r) for r in able}
        return Choice(min(terms, key=lambda id_: (terms[id_], id_)), "least_cost", terms)

    def _cost(self, request: TurnRequest, replica: ReplicaView) -> float:
        prefill = replica.queued_tokens + request.context_tokens
        uncached = max(0.0, prefill - self._CREDIT * replica.cached_tokens)
        decode = replica.running_tokens + request.context_tokens
        return (self._SCALE * uncached + decode) / self._BLOCK_TOKENS
