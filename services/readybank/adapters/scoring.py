"""Sampled tokens scored by an idle replica, under the weights that it serves now.

Owns: finding one, the calls, the figure. Promise: only a replica that runs and queues nothing is
asked, one call at a time; it is looked for until there is one, as a version is known before anybody
serves it; all of it ends within `deadline_s`; whatever goes wrong is a ScoreMissed
that says what, never a figure of fewer tokens than it tells or of another version. Does not cover:
when and what to score (drift.py).

The first context of a trajectory is scored, up to `tokens_max` tokens of it: its oldest tokens,
with one prefill. The engine that sampled them is of the same make, so what differs is the weights.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from muster import codec, payload, rpc, segment_codec
from muster.errors import MusterError, Unavailable
from muster.registry import Entry, Registry
from muster.streams import RunStreams, reaching_redis
from muster.types import Segment, SegmentKind
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import InferenceServiceStub
from services.readybank import events as e
from services.readybank.ledger import divergence

if TYPE_CHECKING:
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_TEMPERATURE = 1.0  # drift.scorable
_LOOK_S = 1.0  # from one look at the replicas to the next
_ANSWER_S = 2.0  # one that is idle answers at once


class Scorer:
    """Of one run; `deadline_s`: for one group, all calls together."""

    def __init__(self, streams: RunStreams, registry: Registry, deadline_s: float):
        self._streams, self._registry, self._deadline_s = streams, registry, deadline_s

    async def __call__(self, command: e.ScoreGroup) -> e.GroupScored | e.ScoreMissed:
        """The scores of its trajectories, or of those of them that have sampled tokens."""
        missed = f"no replica serves version {command.version} and is idle"
        try:
            async with asyncio.timeout(self._deadline_s):
                address = await self._idle(command.version)
                missed = "no score"
                return await self._score(command, address)
        except TimeoutError:
            return e.ScoreMissed(command.group, f"{missed} within {self._deadline_s:g} s")
        except MusterError as error:
            return e.ScoreMissed(command.group, str(error))

    async def _score(self, command: e.ScoreGroup, address: str) -> e.GroupScored | e.ScoreMissed:
        scores: list[e.Score] = []
        async with rpc.channel(address) as channel:
            stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
            for wanted in command.siblings:
                segments = await self._first_context(wanted.payload_keys, command.tokens_max)
                found = await self._one(stub, command, wanted, segments)
                scores += [found] if found else []
        if not scores:
            return e.ScoreMissed(command.group, "nothing sampled in the tokens to be scored")
        return e.GroupScored(command.group, tuple(scores))

    async def _idle(self, version: int) -> str:
        """The address of a replica that serves this version and nobody, once there is one."""
        while True:
            with reaching_redis():
                entries = await self._registry.list("inference")
            async with asyncio.TaskGroup() as tasks:
                looks = [
                    tasks.create_task(_is_idle(entry, version), name=f"look-{entry.id}")
                    for entry in entries
                ]
            for entry, look in zip(entries, looks, strict=True):
                if look.result():
                    return entry.address
            await asyncio.sleep(_LOOK_S)

    async def _first_context(self, keys: tuple[str, ...], tokens_max: int) -> list[Segment]:
        """Segments up to so many tokens, the last one cut; read no further than that."""
        found: list[Segment] = []
        size = 0
        for key in keys:
            (data,) = await self._streams.payloads([key])
            if data is None:
                raise payload.refusal("the tokens of a turn are gone", key)
            for message in payload.unpacked(key, data).segments:
                segment = segment_codec.segment_from_pb(message)
                again = segment.kind is SegmentKind.PROMPT
                if again and any(s.kind is not SegmentKind.PROMPT for s in found):
                    return found  # the context began anew
                found.append(_cut(segment, tokens_max - size))
                size += len(found[-1].token_ids)
                if size >= tokens_max:
                    return found
        return found

    async def _one(
        self,
        stub: InferenceServiceAsyncStub,
        command: e.ScoreGroup,
        wanted: e.ToScore,
        segments: list[Segment],
    ) -> e.Score | None:
        ids = [token for segment in segments for token in segment.token_ids]
        behaviour = [p for segment in segments for p in segment.logprobs]
        if not behaviour:
            return None
        request = pb.ScoreRequest(token_ids=codec.pack_ids(ids), temperature=_TEMPERATURE)
        with rpc.calling("Score"):
            answer = await stub.Score(request, timeout=self._deadline_s)
        told = codec.unpack_f32(answer.logprobs)
        if answer.version != command.version or len(told) != len(ids) - 1:
            problem = f"it scored {len(told)} tokens under version {answer.version}"
            raise Unavailable(problem, way_out="later")
        now = [p for at, p in zip(_sampled(segments), [0.0, *told], strict=True) if at]
        kl = divergence(behaviour, now)
        return e.Score(wanted.sibling, wanted.attempt, answer.version, len(behaviour), kl)


async def _is_idle(entry: Entry, version: int) -> bool:
    """It says that it serves this version and nobody; False without an answer."""
    try:
        async with rpc.channel(entry.address) as channel:
            stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
            with rpc.calling(f"status of {entry.id}"):
                request = pb.GetReplicaStatusRequest()
                status = await stub.GetReplicaStatus(request, timeout=_ANSWER_S)
    except MusterError:
        return False
    serves = status.state == pb.REPLICA_STATE_SERVING and status.version == version
    return serves and not status.running and not status.waiting


def _cut(segment: Segment, tokens: int) -> Segment:
    """Ids and log-probabilities of its first tokens."""
    return Segment(segment.kind, segment.token_ids[:tokens], segment.logprobs[:tokens])


def _sampled(segments: list[Segment]) -> list[bool]:
    """For each token, whether the policy sampled it."""
    return [s.kind is SegmentKind.MODEL for s in segments for _ in s.token_ids]
