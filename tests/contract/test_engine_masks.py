"""What every engine promises of top-p and top-k: it tells what was left to choose from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from muster.types import SamplingMask, SamplingParams, Segment, SegmentKind, VersionSpan
from services.inference.engine import UpdatePhase
from tests.contract.engines import PROMPT, Bench, sampled, sampling
from tests.contract.scoring import Trainer, laid_out, mean_difference

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and torch warn at import
    pytest.mark.timeout(400),
]
NUCLEUS = SamplingParams(temperature=0.9, top_p=0.9, top_k=20, seed=5)
TIES = 4  # ids that may share the last place


def rows(mask: SamplingMask) -> list[tuple[int, ...]]:
    found, start = list[tuple[int, ...]](), 0
    for count in mask.counts:
        found.append(mask.token_ids[start : start + count])
        start += count
    return found


async def test_every_token_comes_with_what_it_was_chosen_from(bench: Bench) -> None:
    ids, _, finish = await sampled(bench.engine, sampling(24, params=NUCLEUS))

    assert finish.mask is not None
    found = rows(finish.mask)
    assert all(token in kept for token, kept in zip(ids, found, strict=True))
    assert all(0 < len(kept) <= NUCLEUS.top_k + TIES for kept in found)


async def test_requests_of_one_batch_keep_their_own_filters(bench: Bench) -> None:
    two = SamplingParams(temperature=1.0, top_k=2, seed=9)
    async with asyncio.TaskGroup() as tasks:
        plain = tasks.create_task(sampled(bench.engine, sampling(16)))
        narrow = tasks.create_task(sampled(bench.engine, sampling(16, params=two)))
        wide = tasks.create_task(sampled(bench.engine, sampling(16, params=NUCLEUS)))

    assert plain.result()[2].mask is None
    masks = [one.result()[2].mask for one in (narrow, wide)]
    assert masks[0] is not None
    assert masks[1] is not None
    assert all(2 <= count <= 2 + TIES for count in masks[0].counts)
    if bench.name == "vllm":  # a nucleus differs from token to token
        assert len(set(masks[1].counts)) > 1


async def test_the_trainer_finds_the_engines_log_probabilities_under_the_mask(
    bench: Bench, record_property: Callable[[str, object], None]
) -> None:
    """Within what bfloat16 leaves; without the mask it is another distribution."""
    if bench.folder is None:
        pytest.skip("a scripted engine has no model")
    assert (await bench.receive(bench.state)).phase is UpdatePhase.STAGED
    await bench.engine.commit_update(bench.version + 1)
    bench.version += 1
    ids, logprobs, finish = await sampled(bench.engine, sampling(96, params=NUCLEUS))
    spans = (VersionSpan(0, 0, len(ids), 0),)
    prompt = Segment(SegmentKind.PROMPT, PROMPT)
    reply = Segment(SegmentKind.MODEL, tuple(ids), tuple(logprobs), spans, mask=finish.mask)
    bare = Segment(SegmentKind.MODEL, tuple(ids), tuple(logprobs), spans)
    trainer = Trainer(bench.folder)

    masked = trainer.logprobs(laid_out((prompt, reply), NUCLEUS))
    whole = trainer.logprobs(laid_out((prompt, bare), SamplingParams(temperature=0.9)))

    with_, without = mean_difference(masked, logprobs), mean_difference(whole, logprobs)
    record_property("mean_abs_with_mask", with_)
    record_property("mean_abs_without_mask", without)
    assert with_ < 0.1
    assert without > 3 * with_
