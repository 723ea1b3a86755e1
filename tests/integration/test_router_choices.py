"""What replicas tell of their choices reaches the trainer's sequences, through gRPC and Redis."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster import codec, segment_codec
from muster.layout import Sequence, lay_out
from muster.leased import Trajectory
from muster.payload import unpacked
from muster.segment_codec import UNRECORDED
from muster.streams import RunStreams
from muster.types import Outcome, OutcomeLabel, RoutedExperts, SamplingMask, SamplingParams, Segment
from muster.v1 import common_pb2 as pb
from muster.v1 import inference_pb2 as inf
from tests.integration.router_world import fleet, router
from tests.integration.test_router import complete, events, until
from tests.integration.test_router_resume import TURNS, submission, talkative

pytestmark = pytest.mark.timeout(60)
NUCLEUS = SamplingParams(temperature=1.0, top_p=0.9, top_k=2)


def telling(request: inf.GenerateRequest) -> list[inf.GenerateResponse]:
    """One expert in one layer, the token's place; masks of the token and the next id."""
    *chunks, last = talkative(request)
    ids = [i for chunk in chunks for i in codec.unpack_ids(chunk.token_ids)]
    start, known = request.experts_from, len(request.prompt_token_ids) // 4 + len(ids) - 1
    rows = struct.pack(f"<{known - start}H", *range(start, known)) + UNRECORDED
    last.finish.experts.CopyFrom(
        segment_codec.experts_to_pb(RoutedExperts(layers=1, per_token=1, ids=rows))
    )
    last.finish.experts_from = start
    mask = SamplingMask((2,) * len(ids), tuple(x for i in ids for x in (i, i + 1)))
    last.finish.mask.CopyFrom(segment_codec.mask_to_pb(mask))
    return [*chunks, last]


async def recorded(redis: Redis, run: str, sibling: int) -> Sequence:
    """A finished attempt as the trainer lays it out."""
    segments: list[Segment] = []
    for event in await events(redis, run):
        if event.HasField("turn_finished") and event.episode.sibling == sibling:
            key = event.turn_finished.payload_key
            (data,) = await RunStreams(redis, run).payloads([key])
            assert data is not None
            segments += map(segment_codec.segment_from_pb, unpacked(key, data).segments)
    label = OutcomeLabel(Outcome.MODEL_SUCCESS, "test", 1.0)
    (found,) = lay_out(0, Trajectory("g", "t", sibling, 0, label, tuple(segments), NUCLEUS))
    return found


async def test_masks_and_routing_reach_the_sequences_of_the_trainer(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    sampling = pb.SamplingParams(temperature=1.0, top_p=0.9, top_k=2)
    async with fleet(redis, run) as (replicas, _):
        replicas[0].spoil = telling
        async with router(redis, run, tmp_path) as first:
            await first.stub.SubmitTaskSet(submission(sampling=sampling), timeout=5)
            await until(first.stub, complete)
        asked = {request.experts_from for request in replicas[0].requests}

    sequence = await recorded(redis, run, sibling=0)
    ids = sequence.token_ids
    assert sequence.allowed == tuple((ids[at], ids[at] + 1) for at in sequence.sampled)
    assert sequence.experts is not None
    found = struct.unpack(f"<{len(ids)}H", sequence.experts.ids)
    ends = {at for at in sequence.sampled if at + 1 not in sequence.sampled}
    assert len(ends) == TURNS + 1  # the last token of a reply is computed after its record
    assert all(row == (0xFFFF if at in ends else at) for at, row in enumerate(found))
    assert len(asked) == TURNS + 1  # each turn asks only for what is new


async def test_a_job_whose_replicas_tell_no_masks_trains_nothing_of_it(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    sampling = pb.SamplingParams(temperature=1.0, top_p=0.9, top_k=2)
    async with fleet(redis, run) as (replicas, _):
        replicas[0].spoil = talkative
        rules = {"generate_retries_max": 0, "repairs_max": 0}
        async with router(redis, run, tmp_path, **rules) as first:
            await first.stub.SubmitTaskSet(submission(sampling=sampling), timeout=5)
            await until(first.stub, lambda told: told.outcomes["infra_failure"] > 0)

    assert not [e for e in await events(redis, run) if e.HasField("turn_finished")]
