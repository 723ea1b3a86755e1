"""What becomes of running requests when an engine puts other weights in place."""

from __future__ import annotations

import asyncio

import pytest

from muster.transfer.active import ActiveRequests
from muster.types import FinishReason, VersionSpan
from services.inference.engine import Chunk, CommitFigures, Finish, UpdatePhase
from tests.contract.engines import Bench, sampled, sampling

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and torch warn at import
    pytest.mark.timeout(400),
]


async def under_way(bench: Bench, active: ActiveRequests) -> tuple[int, Finish, CommitFigures]:
    """A request of 150 tokens that runs while the next version is put in place: tokens that had
    left before, its end, what the commit tells."""
    # Staged first: on a busy machine a transfer can take longer than the request.
    assert (await bench.receive(bench.changed())).phase is UpdatePhase.STAGED
    stream = bench.engine.sample(sampling(150))
    count = 0

    async def rest() -> Finish:
        nonlocal count
        async for item in stream:
            if isinstance(item, Finish):
                return item
            count += len(item.token_ids)
        raise AssertionError("no Finish")

    first = await anext(stream)
    assert isinstance(first, Chunk)
    count = len(first.token_ids)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(rest())
        figures = await bench.engine.commit_update(bench.version + 1, active)
    bench.version += 1
    return count, running.result(), figures


async def test_requests_that_may_finish_end_under_the_old_version(bench: Bench) -> None:
    old = bench.version
    _, finish, figures = await under_way(bench, ActiveRequests.FINISH)

    assert finish.spans == (VersionSpan(old, 0, 150, old),)
    assert (figures.requests_finished, figures.requests_recomputed) == (1, 0)


async def test_requests_that_are_aborted_say_what_is_lost(bench: Bench) -> None:
    old = bench.version
    count, finish, figures = await under_way(bench, ActiveRequests.ABORT)

    assert finish.reason is FinishReason.ABORT
    assert finish.spans == (VersionSpan(old, 0, count, old),)
    assert figures.requests_aborted == 1
    assert 0 < figures.tokens_lost <= count < 150


async def test_requests_that_are_kept_say_that_their_kv_is_older(bench: Bench) -> None:
    old = bench.version
    _, finish, figures = await under_way(bench, ActiveRequests.KEEP)

    switch = finish.spans[0].end
    assert finish.spans == (
        VersionSpan(old, 0, switch, old),
        VersionSpan(old + 1, switch, 150, old),
    )
    assert (figures.requests_kept, figures.requests_recomputed) == (1, 0)


async def test_nobody_else_attends_to_kv_that_was_kept(bench: Bench) -> None:
    await under_way(bench, ActiveRequests.KEEP)
    _, _, finish = await sampled(bench.engine, sampling(2))

    assert finish.cached_tokens == 0
    assert finish.spans == (VersionSpan(bench.version, 0, 2, bench.version),)


async def test_what_was_computed_again_is_found_by_the_next_turn(bench: Bench) -> None:
    await under_way(bench, ActiveRequests.RECOMPUTE)
    _, _, finish = await sampled(bench.engine, sampling(2))

    assert finish.cached_tokens > 0


async def test_requests_come_again_after_they_had_to_wait(bench: Bench) -> None:
    await under_way(bench, ActiveRequests.FINISH)
    _, _, finish = await sampled(bench.engine, sampling(3))

    assert finish.spans == (VersionSpan(bench.version, 0, 3, bench.version),)
