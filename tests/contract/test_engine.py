"""What every engine promises (services/inference/engine.py), asked of the fake and of vLLM alike.

The vLLM half is marked `engine`; it starts one engine for all, so each test leaves the engine idle
and may find any version served.
"""

from __future__ import annotations

import asyncio
import uuid

import pytest

from muster.errors import Refused
from muster.types import FinishReason, SamplingParams, VersionSpan
from services.inference.engine import Finish, Sampling, UpdatePhase, UpdateStatus
from tests.contract.engines import PROMPT, SCORE_BOUND, Bench, sampled, sampling

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and torch warn at import
    pytest.mark.timeout(400),
]


async def test_every_token_has_a_logprob_and_a_version(bench: Bench) -> None:
    ids, logprobs, finish = await sampled(bench.engine, sampling(12))

    assert len(ids) == len(logprobs) == 12
    assert all(value <= 0 for value in logprobs)
    assert finish.reason is FinishReason.LENGTH
    assert finish.spans == (VersionSpan(bench.version, 0, 12, bench.version),)


async def test_a_stop_token_is_the_last_token(bench: Bench) -> None:
    ids, _, _ = await sampled(bench.engine, sampling(12))
    stop = ids[5]

    again, _, finish = await sampled(bench.engine, sampling(12, stop=(stop,)))

    assert finish.reason is FinishReason.STOP
    assert again == ids[: ids.index(stop) + 1]


async def test_another_seed_gives_other_tokens(bench: Bench) -> None:
    one, _, _ = await sampled(bench.engine, sampling(12, seed=7))
    same, _, _ = await sampled(bench.engine, sampling(12, seed=7))
    other, _, _ = await sampled(bench.engine, sampling(12, seed=2**64 - 1))

    assert one == same
    assert one != other


async def test_an_aborted_request_finishes_with_its_spans(bench: Bench) -> None:
    request = sampling(500)
    count = 0
    async for item in bench.engine.sample(request):
        if isinstance(item, Finish):
            assert item.reason is FinishReason.ABORT
            assert item.spans[-1].end == count
        else:
            count += len(item.token_ids)
            if count >= 3:
                await bench.engine.abort(request.request_id)

    assert 3 <= count < 500
    assert not await bench.engine.abort(request.request_id)


async def test_an_abort_that_comes_at_once_is_obeyed(bench: Bench) -> None:
    """However little of the request the engine has seen yet."""
    request = sampling(500)
    stream = bench.engine.sample(request)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(anext(stream))  # type: ignore[arg-type]
        await asyncio.sleep(0)  # it has begun
        assert await bench.engine.abort(request.request_id)
    rest = [item async for item in stream]

    last = [first.result(), *rest][-1]
    assert isinstance(last, Finish)
    assert last.reason is FinishReason.ABORT


async def test_a_closed_generator_leaves_nothing_running(bench: Bench) -> None:
    stream = bench.engine.sample(sampling(500))
    await anext(stream)
    assert bench.engine.load().running == 1

    await stream.aclose()

    assert bench.engine.load().running == bench.engine.load().waiting == 0


async def test_long_prompts_that_come_together_are_all_answered(bench: Bench) -> None:
    """More tokens than one step of the engine takes, each with a seed of its own."""
    prompts = [tuple(range(100 + at, 1000 + at)) for at in range(0, 5000, 1000)]
    async with asyncio.TaskGroup() as tasks:
        work = [
            tasks.create_task(
                sampled(
                    bench.engine,
                    Sampling(uuid.uuid4().hex, prompt, SamplingParams(seed=at), 2),
                )
            )
            for at, prompt in enumerate(prompts)
        ]

    assert [len(one.result()[0]) for one in work] == [2] * 5


async def test_what_was_computed_lately_is_found_in_the_cache_in_whole_blocks(bench: Bench) -> None:
    await sampled(bench.engine, sampling(2))
    _, _, finish = await sampled(bench.engine, sampling(2, seed=8))

    block = bench.engine.block_size
    assert finish.cached_tokens == (len(PROMPT) - 1) // block * block > 0


async def test_steps_are_counted_while_something_is_sampled_and_at_no_other_time(
    bench: Bench,
) -> None:
    idle = bench.engine.load().steps
    await sampled(bench.engine, sampling(8))
    busy = bench.engine.load().steps

    assert busy - idle >= 8
    assert bench.engine.load().steps == busy


async def test_score_repeats_what_sampling_said(bench: Bench) -> None:
    ids, logprobs, _ = await sampled(bench.engine, sampling(24))

    scored = await bench.engine.score((*PROMPT, *ids), 1.0)

    assert scored.version == bench.version
    assert len(scored.logprobs) == len(PROMPT) + len(ids) - 1
    found = scored.logprobs[len(PROMPT) - 1 :]
    worst = max(abs(a - b) for a, b in zip(found, logprobs, strict=True))
    assert worst <= SCORE_BOUND[bench.name]


async def test_what_is_not_staged_cannot_be_committed(bench: Bench) -> None:
    before = await bench.engine.score(PROMPT, 1.0)

    with pytest.raises(Refused, match="not staged"):
        await bench.engine.commit_update(bench.version + 1)

    assert await bench.engine.score(PROMPT, 1.0) == before


async def test_weights_that_fail_their_digest_are_refused(bench: Bench) -> None:
    before = await bench.engine.score(PROMPT, 1.0)

    status = await bench.receive(bench.changed(), corrupt=True)

    assert status.phase is UpdatePhase.FAILED
    assert "digest" in status.error
    with pytest.raises(Refused):
        await bench.engine.commit_update(bench.version + 1)
    assert await bench.engine.score(PROMPT, 1.0) == before
    await bench.engine.abort_update()


async def test_an_aborted_update_changes_nothing(bench: Bench) -> None:
    before = await bench.engine.score(PROMPT, 1.0)
    assert (await bench.receive(bench.changed())).phase is UpdatePhase.STAGED

    await bench.engine.abort_update()

    assert (await bench.engine.update_status()).phase is UpdatePhase.IDLE
    assert await bench.engine.score(PROMPT, 1.0) == before


async def test_a_running_request_spans_two_versions(bench: Bench) -> None:
    old = bench.version
    before = await bench.engine.score(PROMPT, 1.0)
    status = await bench.receive(bench.changed())  # on a busy machine longer than the request
    assert status == UpdateStatus(UpdatePhase.STAGED, old + 1, "", status.receive_s)
    stream = bench.engine.sample(sampling(150))
    await anext(stream)

    async def rest() -> Finish:
        async for item in stream:
            if isinstance(item, Finish):
                return item
        raise AssertionError("no Finish")

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(rest())
        figures = await bench.engine.commit_update(old + 1)
    bench.version = old + 1

    spans = running.result().spans
    switch = spans[0].end
    assert spans == (VersionSpan(old, 0, switch, old), VersionSpan(old + 1, switch, 150, old + 1))
    assert figures.version == old + 1
    assert figures.requests_recomputed == 1
    after = await bench.engine.score(PROMPT, 1.0)
    assert after.version == old + 1
    assert after.logprobs != before.logprobs


async def test_going_back_to_equal_weights_gives_equal_figures(bench: Bench) -> None:
    """Exactly: the same kernels on the same bytes, whatever was served in between."""
    found = []
    for state in (bench.state, bench.changed(), bench.state):
        assert (await bench.receive(state)).phase is UpdatePhase.STAGED
        await bench.engine.commit_update(bench.version + 1)
        bench.version += 1
        found.append((await bench.engine.score(PROMPT, 1.0)).logprobs)

    if bench.name == "vllm":  # the fake's figures follow from the version, not from weights
        assert found[0] == found[2]
    assert found[0] != found[1]
