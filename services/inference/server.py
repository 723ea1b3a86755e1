"""muster.v1.InferenceService: protobuf in, domain types to the driver, protobuf out.

Promise: no decisions here. Does not cover: deadlines and error statuses (muster/rpc.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from muster import codec, segment_codec
from muster.fingerprint import fingerprint_to_pb, text
from muster.transfer import wire
from muster.transfer.active import active_from_pb
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import InferenceServiceServicer
from services.inference.driver import ReplicaDriver
from services.inference.engine import Chunk, Finish, Sampling, UpdatePhase
from services.inference.replica import State

SERVICE = "muster.v1.InferenceService"
_STATES = {
    State.STARTING: pb.REPLICA_STATE_STARTING,
    State.SERVING: pb.REPLICA_STATE_SERVING,
    State.FENCED: pb.REPLICA_STATE_FENCED,
    State.DRAINING: pb.REPLICA_STATE_DRAINING,
}
_PHASES = {
    UpdatePhase.IDLE: pb.UPDATE_PHASE_IDLE,
    UpdatePhase.RECEIVING: pb.UPDATE_PHASE_RECEIVING,
    UpdatePhase.STAGED: pb.UPDATE_PHASE_STAGED,
    UpdatePhase.FAILED: pb.UPDATE_PHASE_FAILED,
}


class InferenceServicer(InferenceServiceServicer):
    """The verbs of one replica."""

    def __init__(self, replica_id: str, driver: ReplicaDriver):
        self._id, self._driver = replica_id, driver

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        del context
        sampling = Sampling(
            request_id=request.request_id,
            prompt=tuple(codec.unpack_ids(request.prompt_token_ids)),
            params=codec.sampling_from_pb(request.sampling),
            max_tokens=request.max_tokens,
            stop_token_ids=tuple(request.stop_token_ids),
            experts_from=_within(request.experts_from, request.prompt_token_ids),
        )
        items = self._driver.generate(codec.key_from_pb(request.episode), sampling)
        async with aclosing(items):  # a caller that goes away ends the request in the engine
            async for item in items:
                yield _chunk(item) if isinstance(item, Chunk) else _finish(item)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        del context
        key = codec.key_from_pb(request.episode)
        return pb.AbortResponse(found=await self._driver.abort(key, request.request_id))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        del context
        ids = tuple(codec.unpack_ids(request.token_ids))
        scored = await self._driver.score(ids, request.temperature)
        return pb.ScoreResponse(logprobs=codec.pack_f32(scored.logprobs), version=scored.version)

    async def ClaimReplica(
        self, request: pb.ClaimReplicaRequest, context: Any
    ) -> pb.ClaimReplicaResponse:
        del context
        aborted = await self._driver.claim(request.run, request.owner_epoch)
        return pb.ClaimReplicaResponse(aborted=aborted)

    async def GrantKv(self, request: pb.GrantKvRequest, context: Any) -> pb.GrantKvResponse:
        del context
        engine = self._driver.engine
        load = engine.load()
        grant = await self._driver.grant(request.run, request.owner_epoch, load)
        return pb.GrantKvResponse(
            life=grant.life,
            state=_STATES[grant.state],
            version=grant.version,
            credit_tokens=grant.credit_tokens,
            ttl_s=grant.ttl_s,
            block_size=engine.block_size,
            running=load.running,
            waiting=load.waiting,
            steps=load.steps,
            detail=grant.detail,
            updating=grant.updating,
        )

    async def GetReplicaStatus(
        self, request: pb.GetReplicaStatusRequest, context: Any
    ) -> pb.GetReplicaStatusResponse:
        del request, context
        replica, engine = self._driver.replica, self._driver.engine
        update = await self._driver.update_status()
        load = engine.load()
        return pb.GetReplicaStatusResponse(
            replica=self._id,
            state=_STATES[replica.state],
            version=replica.version,
            running=load.running,
            waiting=load.waiting,
            kv_tokens_total=load.kv_tokens_total,
            kv_tokens_used=load.kv_tokens_used,
            update_phase=_PHASES[update.phase],
            update_version=update.version,
            update_error=update.error or replica.why_fenced,
            fingerprint=text(engine.fingerprint),
            tokens_generated=load.tokens_generated,
            fenced_calls=replica.fenced_calls,
            serving=fingerprint_to_pb(engine.fingerprint),
            experts_dropped=self._driver.experts_dropped,
        )

    async def PrepareWeightUpdate(
        self, request: pb.PrepareWeightUpdateRequest, context: Any
    ) -> pb.PrepareWeightUpdateResponse:
        del context
        serving = await self._driver.prepare(
            request.run,
            request.trainer_epoch,
            wire.manifest_from_pb(request.manifest),
            wire.source_from_pb(request),
        )
        return pb.PrepareWeightUpdateResponse(serving_version=serving)

    async def CommitWeightUpdate(
        self, request: pb.CommitWeightUpdateRequest, context: Any
    ) -> pb.CommitWeightUpdateResponse:
        del context
        active = active_from_pb(request.active)
        at = (request.run, request.trainer_epoch, request.version)
        figures = await self._driver.commit(*at, active)
        return pb.CommitWeightUpdateResponse(
            version=figures.version,
            pause_s=figures.pause_s,
            receive_s=figures.receive_s,
            apply_s=figures.apply_s,
            token_gap_s=figures.token_gap_s,
            requests_recomputed=figures.requests_recomputed,
            tokens_lost=figures.tokens_lost,
            requests_finished=figures.requests_finished,
            requests_aborted=figures.requests_aborted,
            requests_kept=figures.requests_kept,
        )

    async def AbortWeightUpdate(
        self, request: pb.AbortWeightUpdateRequest, context: Any
    ) -> pb.AbortWeightUpdateResponse:
        del context
        serving = await self._driver.abort_update(
            request.run, request.trainer_epoch, request.version, fence=request.fence
        )
        return pb.AbortWeightUpdateResponse(serving_version=serving)


def _chunk(chunk: Chunk) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        token_ids=codec.pack_ids(chunk.token_ids), logprobs=codec.pack_f32(chunk.logprobs)
    )


def _within(experts_from: int, packed: bytes) -> int:
    """A place in the context, whatever a caller says."""
    return min(max(0, experts_from), len(packed) // 4)


def _finish(finish: Finish) -> pb.GenerateResponse:
    experts, mask = finish.experts, finish.mask
    return pb.GenerateResponse(
        finish=pb.GenerateFinish(
            reason=codec.finish_to_pb(finish.reason),
            spans=codec.spans_to_pb(finish.spans),
            cached_tokens=finish.cached_tokens,
            queue_s=finish.queue_s,
            prefill_s=finish.prefill_s,
            decode_s=finish.decode_s,
            experts=None if experts is None else segment_codec.experts_to_pb(experts),
            experts_from=finish.experts_from,
            mask=None if mask is None else segment_codec.mask_to_pb(mask),
        )
    )
