"""Work beside the loop that nobody waits for longer than they want to."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.trainer.adapters.worker import at_work, in_daemon, unless


async def test_the_result_or_the_exception_comes_back() -> None:
    assert await in_daemon(lambda: 7, "sum") == 7
    with pytest.raises(ValueError, match="no"):
        await in_daemon(lambda: int("no"), "sum")


async def test_a_stop_ends_the_wait_and_not_the_work() -> None:
    release, stopping = threading.Event(), asyncio.Event()
    stopping.set()
    try:
        assert await unless(stopping, in_daemon(lambda: release.wait(15), "w"), "wait") is None
        assert at_work()
    finally:
        release.set()


async def test_without_a_stop_the_result_counts() -> None:
    assert await unless(asyncio.Event(), in_daemon(lambda: "made", "m"), "make") == "made"
