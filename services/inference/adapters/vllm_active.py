"""What is done with running requests before weights are put in place.

Owns: ending them, or waiting for their end; new weights packed first where that keeps the engine's
stop short for them. Promise: bounded; a request that does not end in time is computed again, never
lost. Does not cover: the pause and the apply (vllm.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from muster.errors import Unavailable
from muster.transfer.active import ActiveRequests
from muster.types import Value
from services.inference.adapters.vllm_stats import LoadMeter

_ABORT_S = 5.0  # for requests to end that were aborted
_PACK_POLL_S = 0.02


class Settled(Value, frozen=True):
    """How many requests went which way. tokens_lost: sampled ones of aborted requests."""

    finished: int = 0
    aborted: int = 0
    kept: int = 0
    recomputed: int = 0
    tokens_lost: int = 0


async def pack(ask: Callable[[str], Awaitable[Any]], load: LoadMeter, limit_s: float) -> None:
    """A version that came while nothing ran is packed now if something does, or if some version is
    being packed (vllm_receiver.py): that goes on beside a reload."""
    try:
        async with asyncio.timeout(limit_s):
            while True:
                status = await ask("muster_update_status")
                if status is None or status["phase"] != "staged" or status["packed"]:
                    return
                if not load.names() and not status["packing"]:
                    return
                await ask("muster_pack")
                await asyncio.sleep(_PACK_POLL_S)
    except TimeoutError:
        raise Unavailable(
            f"the new weights were not packed within {limit_s} s",
            field="inference.apply_timeout_s",
            value=limit_s,
            way_out="see the load of that machine, or allow more time; publish again",
        ) from None


async def settle(llm: Any, load: LoadMeter, active: ActiveRequests, finish_s: float) -> Settled:
    """Right before the pause. No new request may come meanwhile where they are to end."""
    before, hand, lost = load.started(), set(load.names()), 0
    match active:
        case ActiveRequests.FINISH:
            await load.emptied(finish_s)
        case ActiveRequests.ABORT:
            lost = load.abort_all()
            await llm.abort(load.names())
            await load.emptied(_ABORT_S)
        case ActiveRequests.KEEP:
            return Settled(kept=before)
        case ActiveRequests.RECOMPUTE:
            return Settled(recomputed=before)
    # Not by those that have begun to sample: one that waited for its turn may do so meanwhile.
    left, ended = load.started(), len(hand.difference(load.names()))
    if active is ActiveRequests.ABORT:
        return Settled(aborted=ended, recomputed=left, tokens_lost=lost)
    return Settled(finished=ended, recomputed=left)


def ends(active: ActiveRequests) -> bool:
    """True when requests are to end before the apply: new ones wait."""
    return active in (ActiveRequests.FINISH, ActiveRequests.ABORT)
