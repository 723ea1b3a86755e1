"""What becomes of requests that run while weights are put in place.

Owns: `ActiveRequests` and its wire form. Does not cover: how an engine does it.
"""

from __future__ import annotations

from enum import StrEnum

from muster.errors import InvalidInput
from muster.v1 import inference_pb2 as pb


class ActiveRequests(StrEnum):
    """One for all requests of an engine, chosen for each publication."""

    FINISH = "finish"  # they end first, under the old version; new ones wait
    ABORT = "abort"  # they are aborted; who asked goes on elsewhere, or here afterwards
    KEEP = "keep"  # they go on over the KV of the older version, which their spans say
    RECOMPUTE = "recompute"  # their KV is dropped and computed again under the new version


_TO_PB = {
    ActiveRequests.FINISH: pb.ACTIVE_REQUESTS_FINISH,
    ActiveRequests.ABORT: pb.ACTIVE_REQUESTS_ABORT,
    ActiveRequests.KEEP: pb.ACTIVE_REQUESTS_KEEP,
    ActiveRequests.RECOMPUTE: pb.ACTIVE_REQUESTS_RECOMPUTE,
}
_FROM_PB = {number: active for active, number in _TO_PB.items()}


def active_to_pb(active: ActiveRequests) -> pb.ActiveRequests.ValueType:
    return _TO_PB[active]


def active_from_pb(number: int) -> ActiveRequests:
    """Unspecified is recompute: what publishers meant before there was a choice."""
    if number == pb.ACTIVE_REQUESTS_UNSPECIFIED:
        return ActiveRequests.RECOMPUTE
    found = _FROM_PB.get(pb.ActiveRequests.ValueType(number))
    if found is None:
        raise InvalidInput(
            "no such fate of active requests",
            field="active",
            value=number,
            way_out="finish, abort, keep or recompute",
        )
    return found
