"""What is counted of requests that end before an apply."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from muster.transfer.active import ActiveRequests
from services.inference.adapters.vllm_active import Settled, settle
from services.inference.adapters.vllm_stats import LoadMeter


class Engine:
    """Hears of aborts; requests end by the test's word alone."""

    async def abort(self, names: Sequence[str]) -> None:
        del names


async def settled(meter: LoadMeter, active: ActiveRequests, *ends: str, begins: str) -> Settled:
    """While it is waited, `begins` gives its first token and then `ends` are over."""
    async with asyncio.TaskGroup() as tasks:
        settling = tasks.create_task(settle(Engine(), meter, active, 0.05))
        await asyncio.sleep(0)
        live = meter.find(begins)
        assert live is not None
        live.started = True
        for name in ends:
            meter.over(name)
    return settling.result()


async def test_one_that_began_meanwhile_hides_none_that_finished() -> None:
    meter = LoadMeter()
    with ExitStack() as hand:
        hand.enter_context(meter.request("sampling")).started = True
        hand.enter_context(meter.request("queued"))

        found = await settled(meter, ActiveRequests.FINISH, "sampling", begins="queued")

    assert found == Settled(finished=1, recomputed=1)


async def test_no_count_is_below_none() -> None:
    meter = LoadMeter()
    with meter.request("queued"):
        found = await settled(meter, ActiveRequests.FINISH, begins="queued")

    assert found == Settled(finished=0, recomputed=1)


async def test_one_that_waited_for_its_turn_is_counted_when_it_ends() -> None:
    meter = LoadMeter()
    with meter.request("queued"):
        found = await settled(meter, ActiveRequests.FINISH, "queued", begins="queued")

    assert found == Settled(finished=1)
