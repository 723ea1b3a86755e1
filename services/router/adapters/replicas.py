"""The router's calls to replicas: sampling, its end, credits, probes.

Owns: the requests in hand, by episode, turn and retry. Promise: a request that was aborted ends
here at once and is aborted on its replica too, so that nothing decodes for nobody; every call has a
deadline and every stream is cancelled when its reader leaves; a probe's tokens go nowhere. Does not
cover: what an answer leads to in the conversation (calls.py), when a replica is asked (driver.py).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import grpc

from muster import codec, rpc, telemetry
from muster.clock import monotonic
from muster.errors import Exhausted, Fenced, InvalidInput, MusterError, Unavailable
from muster.types import EpisodeKey, SamplingParams, VersionSpan
from muster.v1 import inference_pb2 as inf
from muster.v1.inference_pb2_grpc import InferenceServiceStub
from services.router import events as e
from services.router.adapters.channels import Channels
from services.router.adapters.reach import best_effort
from services.router.adapters.requests import METHOD, generate_request
from services.router.context import Parts
from services.router.conversation import ChatCodec

if TYPE_CHECKING:  # this name is in the generated stubs only
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub

R = TypeVar("R")
Reply = tuple[tuple[tuple[int, ...], tuple[float, ...]], inf.GenerateFinish]
"""Ids and log-probabilities, equally many; how it ended."""
_log = telemetry.logger("router.replicas")
_CLAIM_S = 2.0
_GRANT_S = 2.0
_ABORT_S = 5.0
_TOUCH_S = 30.0
_TOUCHES_MAX = 4  # at a time, of one replica
_PROBE_TOKENS = 2
_PROBE_TEXT = "Count: 1 2 3 4 5 6 7 8"
_GREEDY = SamplingParams(temperature=1.0, top_k=1)


class _Peer:
    """How one replica is called; `generate` takes bytes (requests.py)."""

    def __init__(self, channel: grpc.aio.Channel):
        self.stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
        read = inf.GenerateResponse.FromString
        self.generate: Any = channel.unary_stream(METHOD, response_deserializer=read)


class ReplicaCalls:
    """Calls to the replicas that `channels` knows."""

    def __init__(self, channels: Channels, chat_codec: ChatCodec):
        self._channels, self._codec = channels, chat_codec
        self._in_hand: dict[str, grpc.aio.UnaryStreamCall[Any, Any]] = {}  # request id → its call
        self._numbers = itertools.count()
        self._touches: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def _peer(self, replica: str) -> _Peer:
        found: _Peer = self._channels.stub(replica, _Peer)
        return found

    def _engine(self, replica: str) -> InferenceServiceAsyncStub:
        return self._peer(replica).stub

    async def claim(self, run: str, replica: str, owner_epoch: int) -> bool:
        """Make a replica refuse every older owner; False when it does not answer now."""
        request = inf.ClaimReplicaRequest(run=run, owner_epoch=owner_epoch)
        claimed = await claiming(
            lambda: self._engine(replica).ClaimReplica(request, timeout=_CLAIM_S), replica
        )
        return claimed is not None

    async def status(self, replica: str, *, timeout_s: float) -> inf.GetReplicaStatusResponse:
        """What it says of itself. Raises MusterError."""
        request = inf.GetReplicaStatusRequest()
        return await self._engine(replica).GetReplicaStatus(request, timeout=timeout_s)

    async def grant(
        self, run: str, replica: str, owner_epoch: int
    ) -> e.ReplicaTold | e.ReplicaSilent:
        """Ask for a credit. Raises Fenced when a newer router owns the run."""
        request = inf.GrantKvRequest(run=run, owner_epoch=owner_epoch)
        asked = monotonic()
        try:
            with rpc.calling(f"GrantKv on {replica}"):
                told = await self._engine(replica).GrantKv(request, timeout=_GRANT_S)
            trip_s = monotonic() - asked
            _check(told)
        except Fenced:
            raise
        except MusterError as error:
            return e.ReplicaSilent(replica, str(error))
        return e.ReplicaTold(
            replica=replica,
            life=told.life,
            version=told.version,
            serving=told.state == inf.REPLICA_STATE_SERVING,
            credit_tokens=max(0, told.credit_tokens),
            ttl_s=told.ttl_s,
            block_size=told.block_size,
            running=told.running,
            waiting=told.waiting,
            steps=told.steps,
            detail=told.detail,
            updating=told.updating,
            trip_s=trip_s,
        )

    async def probe(self, command: e.ProbeReplica, run: str, owner_epoch: int) -> e.ReplicaProbed:
        """A few tokens after a fixed prompt, greedily; passed when they are whole."""
        ids = self._codec.encode(_PROBE_TEXT, special=False)
        name = f"probe.{command.life[:8]}.{next(self._numbers)}"
        request = inf.GenerateRequest(
            episode=codec.key_to_pb(EpisodeKey(run, "probe", 0, 0, owner_epoch)),
            request_id=name,
            sampling=codec.sampling_to_pb(_GREEDY),
            max_tokens=_PROBE_TOKENS,
        )
        began, detail, full, context = monotonic(), "", False, (codec.pack_ids(ids),)
        try:
            (_, logprobs), _ = await self._sampled(
                command.replica, request, context, command.timeout_s
            )
            if not logprobs or not all(math.isfinite(value) for value in logprobs):
                detail = f"it answered a probe with log-probabilities {logprobs}"
        except Fenced:
            raise
        except Exhausted as error:
            detail, full = str(error), True
        except MusterError as error:
            detail = str(error)
        took_s = monotonic() - began
        return e.ReplicaProbed(command.replica, command.life, not detail, detail, took_s, full)

    async def sample(
        self, command: e.Generate, context: Parts, room: int, experts_from: int = 0
    ) -> Reply:
        """One turn after a packed context, read before this waits. Raises MusterError.

        experts_from: first token of the context whose routing is not known yet.
        """
        request = inf.GenerateRequest(
            episode=codec.key_to_pb(command.episode),
            request_id=_name(command),
            sampling=_sampling(command.sampling),
            max_tokens=room,
            stop_token_ids=self._codec.stop_ids,
            experts_from=experts_from,
        )
        return await self._sampled(command.replica, request, context, command.timeout_s)

    async def _sampled(
        self, replica: str, request: inf.GenerateRequest, context: Parts, timeout_s: float
    ) -> Reply:
        ids: list[int] = []
        logprobs: list[float] = []
        with rpc.calling(f"Generate on {replica}"):
            call = self._peer(replica).generate(
                generate_request(request, context), timeout=timeout_s
            )
            parts = aiter(call)
            self._in_hand[request.request_id] = call
            try:
                async for part in parts:
                    ids += codec.unpack_ids(part.token_ids)
                    logprobs += codec.unpack_f32(part.logprobs)
                    if part.HasField("finish"):
                        _check_reply(ids, logprobs, codec.spans_from_pb(part.finish.spans))
                        return (tuple(ids), tuple(logprobs)), part.finish
            finally:
                del self._in_hand[request.request_id]
                call.cancel()
                await _closed(parts)
        raise Unavailable("the replica ended the stream without a finish")

    async def abort(self, command: e.AbortGenerate) -> None:
        """End it here, then there: the replica may not notice soon that nobody reads."""
        call = self._in_hand.get(_name(command))
        if call is not None:
            call.cancel()
        request = inf.AbortRequest(
            episode=codec.key_to_pb(command.episode), request_id=_name(command)
        )
        await best_effort(lambda: self._engine(command.replica).Abort(request, timeout=_ABORT_S))

    async def touch(self, episode: EpisodeKey, replica: str, context: bytes) -> None:
        """Keep a packed context in a replica's cache by one token, thrown away; it may fail."""
        request = inf.GenerateRequest(
            episode=codec.key_to_pb(episode),
            request_id=f"{episode.id}.touch.{next(self._numbers)}",
            sampling=codec.sampling_to_pb(_GREEDY),
            max_tokens=1,
        )
        # Few at a time: they take the places of turns.
        places = self._touches.setdefault(replica, asyncio.Semaphore(_TOUCHES_MAX))
        async with places:
            await best_effort(lambda: self._sampled(replica, request, (context,), _TOUCH_S))


async def _closed(parts: object) -> None:
    """End a stream's generator that was left before its end: it and its call refer to each other,
    and whatever the collector finds of them it only moves to its next generation."""
    if isinstance(parts, AsyncGenerator):
        await parts.aclose()


_sampling = lru_cache(maxsize=64)(codec.sampling_to_pb)  # of each job; nobody changes it


def _name(command: e.Generate | e.AbortGenerate) -> str:
    return f"{command.episode.id}.{command.turn}.{command.retry}"


def _check_reply(ids: list[int], logprobs: list[float], spans: tuple[VersionSpan, ...]) -> None:
    """Every sampled token has a log-probability and exactly one version, or the turn is void."""
    covered = 0
    for span in spans:
        if span.start != covered or span.end <= span.start:
            break
        covered = span.end
    if len(logprobs) != len(ids) or covered != len(ids):
        raise Unavailable(
            f"the replica answered {len(ids)} tokens, {len(logprobs)} log-probabilities and "
            f"versions for {covered}",
            way_out="the turn is asked for again",
        )


def _check(told: inf.GrantKvResponse) -> None:
    """Refuse a credit whose end cannot be known."""
    if not (math.isfinite(told.ttl_s) and told.ttl_s > 0):
        raise InvalidInput(
            "a credit has to end some seconds from now",
            field="ttl_s",
            value=told.ttl_s,
            way_out="let the replica grant a finite time above 0 (inference.credit_ttl_s)",
        )


async def claiming(call: Callable[[], Awaitable[R]], who: str) -> R | None:
    """Its answer when it knows; Fenced is raised: then we are a former owner ourselves."""
    try:
        with rpc.calling(f"claiming {who}"):
            return await call()
    except Fenced:
        raise
    except MusterError as error:
        _log.info("%s is not claimed yet: %s", who, error)
        return None
