"""The longest gap between tokens around an apply, and that nobody waits long to know it."""

from __future__ import annotations

import asyncio

from muster.clock import monotonic
from services.inference.adapters.vllm_stats import TokenMeter


def sampling(*, at: float) -> TokenMeter:
    """A meter in a window, with one request that gave a token at `at` and none since the apply."""
    meter = TokenMeter()
    meter.open_window()
    meter.tokens("r", at, 1)
    meter.apply_done()
    return meter


async def test_a_late_token_is_not_waited_for_and_the_gap_so_far_is_told() -> None:
    meter = sampling(at=monotonic() - 50.0)

    assert await meter.close_window(wait_s=0.0) >= 50.0


async def test_the_first_token_after_the_apply_ends_the_gap() -> None:
    meter = sampling(at=100.0)
    async with asyncio.TaskGroup() as tasks:
        closing = tasks.create_task(meter.close_window(wait_s=60.0))
        await asyncio.sleep(0)
        meter.tokens("r", 103.0, 1)

    assert closing.result() == 3.0


async def test_nobody_is_waited_for_when_the_last_request_ended() -> None:
    meter = sampling(at=100.0)
    meter.ended("r")

    assert await meter.close_window(wait_s=60.0) == 0.0
