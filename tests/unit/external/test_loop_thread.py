"""Asynchronous code called from code that is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from muster.errors import Refused, Unavailable
from muster.loop_thread import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    made.close()


async def _answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


@asynccontextmanager
async def _noted(name: str, notes: list[str]) -> AsyncIterator[asyncio.Task[None] | None]:
    entered_by = asyncio.current_task()
    yield entered_by
    assert asyncio.current_task() is entered_by, "left by another task"
    notes.append(name)


def test_a_call_gives_its_result_or_raises_what_it_raised(loop: LoopThread) -> None:
    async def fail() -> None:
        raise Unavailable("away")

    assert loop.call(_answer(3)) == 3
    with pytest.raises(Unavailable, match="away"):
        loop.call(fail())


def test_what_was_entered_is_left_in_reverse_by_its_own_task() -> None:
    made, notes = LoopThread(), list[str]()
    made.enter(_noted("first", notes))
    made.enter(_noted("second", notes))
    made.close()
    assert notes == ["second", "first"]
    made.close()  # a second time changes nothing


def test_one_may_be_left_before_the_others(loop: LoopThread) -> None:
    notes: list[str] = []
    first = _noted("first", notes)
    loop.enter(first)
    loop.enter(_noted("second", notes))
    loop.leave(first)
    loop.leave(first)
    assert notes == ["first"]


def test_what_cannot_be_entered_raises_and_the_loop_goes_on(loop: LoopThread) -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise Unavailable("not there")
        yield

    with pytest.raises(Unavailable, match="not there"):
        loop.enter(broken())
    assert loop.call(_answer(1)) == 1


def test_a_call_that_is_given_up_ends(loop: LoopThread) -> None:
    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        loop.call(wait(), timeout_s=0.01)
    loop.call(asyncio.wait_for(ended.wait(), 5))


def test_after_the_end_a_call_says_so() -> None:
    made = LoopThread()
    made.close()
    with pytest.raises(Refused, match="closed"):
        made.call(_answer(1))
