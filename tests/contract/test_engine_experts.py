"""What every engine with a mixture-of-experts model promises: it tells where it sent each token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from muster.types import Segment, SegmentKind, VersionSpan
from services.inference.engine import Chunk, Finish, UpdatePhase
from tests.contract.engines import PROMPT, Bench, sampled, sampling
from tests.contract.moe import CHOSEN, EXPERTS, LAYERS
from tests.contract.scoring import Trainer, laid_out, mean_difference

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and torch warn at import
    pytest.mark.timeout(400),
]
UNRECORDED = 0xFFFF


def rows(finish: Finish) -> Any:
    """[tokens, layers, per_token]"""
    assert finish.experts is not None
    assert (finish.experts.layers, finish.experts.per_token) == (LAYERS, CHOSEN)
    return np.frombuffer(finish.experts.ids, dtype="<u2").reshape(-1, LAYERS, CHOSEN)


async def test_every_token_but_the_last_has_its_experts(moe_bench: Bench) -> None:
    _, _, finish = await sampled(moe_bench.engine, sampling(12))

    found = rows(finish)
    assert len(found) == len(PROMPT) + 12
    assert (found[:-1] < EXPERTS).all()
    assert (found[:-1, :, 0] != found[:-1, :, 1]).all()
    assert (found[-1] == UNRECORDED).all()


async def test_tokens_found_in_the_cache_have_the_experts_that_they_were_computed_with(
    moe_bench: Bench,
) -> None:
    _, _, first = await sampled(moe_bench.engine, sampling(4))
    _, _, second = await sampled(moe_bench.engine, sampling(4, seed=8))

    assert second.cached_tokens > 0
    assert (rows(first)[: len(PROMPT)] == rows(second)[: len(PROMPT)]).all()


@pytest.mark.parametrize("known", [1, 32, 39, 40])
async def test_only_what_the_caller_does_not_know_is_told(moe_bench: Bench, known: int) -> None:
    _, _, whole = await sampled(moe_bench.engine, sampling(4))
    _, _, rest = await sampled(moe_bench.engine, sampling(4, experts_from=known))

    assert rest.experts_from == known
    assert (rows(rest) == rows(whole)[known:]).all()


async def test_requests_of_one_batch_have_their_own_rows(moe_bench: Bench) -> None:
    prompts = [tuple(range(at, at + 40 + at // 100)) for at in range(100, 900, 200)]
    alone = [await sampled(moe_bench.engine, sampling(8, prompt=p)) for p in prompts]
    async with asyncio.TaskGroup() as tasks:
        work = [
            tasks.create_task(sampled(moe_bench.engine, sampling(8, prompt=p))) for p in prompts
        ]

    for prompt, one, other in zip(prompts, alone, work, strict=True):
        same = rows(one[2])[: len(prompt)] == rows(other.result()[2])[: len(prompt)]
        assert same.all()


async def test_a_request_that_is_computed_again_under_new_weights_has_all_its_rows(
    moe_bench: Bench,
) -> None:
    stream = moe_bench.engine.sample(sampling(150))
    assert isinstance(await anext(stream), Chunk)
    assert (await moe_bench.receive(moe_bench.changed())).phase is UpdatePhase.STAGED

    async def rest() -> Finish:
        async for item in stream:
            if isinstance(item, Finish):
                return item
        raise AssertionError("no Finish")

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(rest())
        await moe_bench.engine.commit_update(moe_bench.version + 1)
    moe_bench.version += 1

    found = rows(running.result())
    assert len(found) == len(PROMPT) + 150
    assert (found[:-1] < EXPERTS).all()


async def test_going_back_to_equal_weights_gives_equal_figures(moe_bench: Bench) -> None:
    found = []
    for state in (moe_bench.state, moe_bench.changed(), moe_bench.state):
        assert (await moe_bench.receive(state)).phase is UpdatePhase.STAGED
        await moe_bench.engine.commit_update(moe_bench.version + 1)
        moe_bench.version += 1
        found.append((await moe_bench.engine.score(PROMPT, 1.0)).logprobs)

    if moe_bench.name == "vllm":
        assert found[0] == found[2]
    assert found[0] != found[1]


async def test_the_trainer_is_nearer_to_the_engine_with_the_engines_experts(
    moe_bench: Bench, record_property: Callable[[str, object], None]
) -> None:
    if moe_bench.folder is None:
        pytest.skip("a scripted engine has no model")
    assert (await moe_bench.receive(moe_bench.state)).phase is UpdatePhase.STAGED
    await moe_bench.engine.commit_update(moe_bench.version + 1)
    moe_bench.version += 1
    trainer = Trainer(moe_bench.folder)
    replayed, by_itself, same, cells = [], [], 0, 0
    for seed in range(4):
        request = sampling(96, seed=seed)
        ids, logprobs, finish = await sampled(moe_bench.engine, request)
        prompt, reply = _segments(ids, logprobs, finish)
        told = laid_out((prompt, reply), request.params)
        bare = laid_out((Segment(SegmentKind.PROMPT, PROMPT), _bare(reply)), request.params)
        replayed.append(mean_difference(trainer.logprobs(told), logprobs))
        by_itself.append(mean_difference(trainer.logprobs(bare), logprobs))
        own, theirs = np.sort(trainer.routes(bare).numpy()), np.sort(rows(finish))
        same += int((own[:-1] == theirs[:-1]).all(-1).sum())
        cells += len(own[:-1]) * LAYERS

    with_, without = sum(replayed) / 4, sum(by_itself) / 4
    record_property("mean_abs_replayed", with_)
    record_property("mean_abs_by_itself", without)
    record_property("routed_alike", same / cells)
    assert same / cells > 0.8
    assert with_ < without


def _segments(ids: list[int], logprobs: list[float], finish: Finish) -> tuple[Segment, Segment]:
    from services.router.told import Told, routed

    spans = (VersionSpan(0, 0, len(ids), 0),)
    bare = [
        Segment(SegmentKind.PROMPT, PROMPT),
        Segment(SegmentKind.MODEL, tuple(ids), tuple(logprobs), spans),
    ]
    prompt, reply = routed(bare, 0, Told(None, finish.experts, finish.experts_from))
    return prompt, reply


def _bare(reply: Segment) -> Segment:
    return Segment(reply.kind, reply.token_ids, reply.logprobs, reply.spans)
