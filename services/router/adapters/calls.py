"""The router's calls to replicas and hosts: one command in, one event out.

Owns: channels, deadlines, conversations' tokens. Promise: an expected failure becomes an event;
an Exec whose answer was lost is asked for again under the same key, so it never runs twice, and
also of the successor of a host whose service went away; every stream is cancelled when its reader
leaves. Does not cover: what is decided on the events.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc
import msgspec

from muster import codec, failpoints, rpc, telemetry
from muster.errors import Exhausted, Fenced, MusterError, Unavailable
from muster.replay import output_text
from muster.types import EpisodeKey, FinishReason, Segment, VersionSpan
from muster.v1 import common_pb2 as pb
from muster.v1 import inference_pb2 as inf
from muster.v1 import sandbox_pb2 as sbx
from muster.v1.inference_pb2_grpc import InferenceServiceStub
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub
from services.router import events as e
from services.router.adapters.clocks import Clocks
from services.router.adapters.reach import begun, best_effort, keyed, loss_at_verdict, loss_of
from services.router.adapters.restore import TurnUsage
from services.router.conversation import ChatCodec, Conversation

if TYPE_CHECKING:  # these names are in the generated stubs only
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub
    from muster.v1.sandbox_pb2_grpc import SandboxServiceAsyncStub

R = TypeVar("R")
_log = telemetry.logger("router.calls")
_KEEP_S = 300.0  # how long an address outlives its announcement
_CLAIM_S = 2.0
_SLACK_S = 15.0  # over a limit that the other side enforces itself
_NOT_SERVING = "replica.state"  # the field by which a replica says so


class Calls:
    """Executes the commands that leave the router."""

    def __init__(
        self,
        chat_codec: ChatCodec,
        archive: Callable[[str], Awaitable[bytes]],
        *,
        box_start_timeout_s: float,
        verify_queue_s: float = 0.0,
        host_away_s: float = 0.0,
        clocks: Clocks | None = None,
    ):
        """`verify_queue_s`: how long a verification may wait for a place on its host.

        `host_away_s`: how long a sandbox host may be away before its boxes count as lost.
        """
        self._host_away_s = host_away_s
        self._codec, self._archive = chat_codec, archive
        self._box_start_timeout_s, self._verify_queue_s = box_start_timeout_s, verify_queue_s
        self._clocks = clocks or Clocks()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.addresses: dict[str, str] = {}  # replica or host id → address
        self._gone_since: dict[str, float] = {}  # of ids that are no longer announced
        self._conversations: dict[str, Conversation] = {}
        self.usage: dict[str, TurnUsage] = {}  # episode id → of its newest reply

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    def conversation(self, episode: EpisodeKey) -> Conversation:
        return self._conversations.setdefault(episode.id, Conversation(self._codec))

    def text(self, ids: Sequence[int]) -> str:
        """Text of sampled ids."""
        return self._codec.decode(tuple(ids))

    def restore(
        self,
        episode: str,
        opening: tuple[e.Message, ...],
        turns: Sequence[Sequence[Segment]],
        answers: Sequence[e.Message],
        usage: TurnUsage,
    ) -> None:
        """Take an episode over from a former router (restore.Conversations)."""
        conversation = Conversation(self._codec)
        conversation.restore(opening, turns, answers)
        self._conversations[episode], self.usage[episode] = conversation, usage

    def drop(self, episode: EpisodeKey) -> None:
        self._conversations.pop(episode.id, None)
        self.usage.pop(episode.id, None)

    def addresses_are(self, addresses: Mapping[str, str], now: float) -> list[grpc.aio.Channel]:
        """Take the announced addresses; answers the channels that nobody needs any more.

        An absent entry is no proof that its peer is gone (Redis may have been away): its channel,
        and the calls on it, are kept for a while.
        """
        self.addresses |= addresses
        gone = self.addresses.keys() - addresses.keys()
        self._gone_since = {id_: self._gone_since.get(id_, now) for id_ in gone}
        for id_, since in self._gone_since.items():
            if now - since > _KEEP_S:
                del self.addresses[id_]
        unused = self._channels.keys() - self.addresses.values()
        return [self._channels.pop(address) for address in unused]

    def _channel(self, id_: str) -> grpc.aio.Channel:
        address = self.addresses.get(id_)
        if address is None:
            raise Unavailable(
                f"{id_} is no longer announced", field="address", way_out="another one is chosen"
            )
        if address not in self._channels:
            self._channels[address] = rpc.open_channel(address)
        return self._channels[address]

    def _engine(self, replica: str) -> InferenceServiceAsyncStub:
        stub: InferenceServiceAsyncStub = InferenceServiceStub(self._channel(replica))
        return stub

    def _host(self, host: str) -> SandboxServiceAsyncStub:
        stub: SandboxServiceAsyncStub = SandboxServiceStub(self._channel(host))
        return stub

    # -- taking over -------------------------------------------------------------------

    async def claim_replica(self, run: str, replica: str, owner_epoch: int) -> bool:
        """Make a replica refuse every older owner; False when it does not answer now."""
        request = inf.ClaimReplicaRequest(run=run, owner_epoch=owner_epoch)
        claimed = await _claimed(
            lambda: self._engine(replica).ClaimReplica(request, timeout=_CLAIM_S), replica
        )
        return claimed is not None

    async def claim_host(self, run: str, host: str, owner_epoch: int) -> e.BoxesFound | None:
        """The same of a sandbox host: its living boxes; None when it does not answer now."""
        request = sbx.ClaimHostRequest(run=run, owner_epoch=owner_epoch)
        found = await _claimed(lambda: self._host(host).ClaimHost(request, timeout=_CLAIM_S), host)
        if found is None:
            return None
        keys = [(codec.key_from_pb(living.episode), living.box) for living in found.boxes]
        living = [
            e.Living(msgspec.structs.replace(k, owner_epoch=owner_epoch), box, k.owner_epoch)
            for k, box in keys
        ]
        return e.BoxesFound(host, tuple(living))

    # -- inference ---------------------------------------------------------------------

    async def generate(self, command: e.Generate) -> e.RouterEvent:
        conversation = self.conversation(command.episode)
        if command.turn == 0 and command.messages:
            conversation.open(command.messages)
        else:
            for message in command.messages:
                conversation.observe(message)
        context = conversation.context
        room = min(command.max_tokens, command.context_max - len(context))
        if room <= 0:
            return e.ContextFull(command.episode, command.turn)
        start, end = self._clocks.start()
        try:
            await failpoints.at("router.generate.before")
            sampled, finish = await self._sample(command, context, room)
            await failpoints.at("router.generate.after")
            reason = codec.finish_from_pb(finish.reason)
        except Fenced:
            raise
        except MusterError as error:
            full = isinstance(error, Exhausted) or error.field == _NOT_SERVING
            at = (command.episode, command.turn, command.replica)
            return e.GenerateFailed(*at, str(error), full=full)
        if reason is FinishReason.ABORT:
            why = "the replica aborted the request"
            return e.GenerateFailed(command.episode, command.turn, command.replica, why)
        spans = codec.spans_from_pb(finish.spans)
        text = conversation.reply(*sampled, spans)
        if self._conversations.get(command.episode.id) is conversation:  # not dropped meanwhile
            self.usage[command.episode.id] = TurnUsage(
                len(context), len(sampled[0]), finish.cached_tokens, spans
            )
        return e.Generated(
            episode=command.episode,
            turn=command.turn,
            text=text,
            finish=reason,
            prompt_tokens=len(context),
            sampled_tokens=len(sampled[0]),
            start_unix_s=start,
            queue_s=_seconds(finish.queue_s),
            prefill_s=_seconds(finish.prefill_s),
            end_unix_s=end(),
        )

    async def _sample(
        self, command: e.Generate, context: list[int], room: int
    ) -> tuple[tuple[tuple[int, ...], tuple[float, ...]], inf.GenerateFinish]:
        request = inf.GenerateRequest(
            episode=codec.key_to_pb(command.episode),
            request_id=f"{command.episode.id}.{command.turn}.{command.retry}",
            prompt_token_ids=codec.pack_ids(context),
            sampling=codec.sampling_to_pb(command.sampling),
            max_tokens=room,
            stop_token_ids=self._codec.stop_ids,
        )
        ids: list[int] = []
        logprobs: list[float] = []
        with rpc.calling(f"Generate on {command.replica}"):
            call = self._engine(command.replica).Generate(request, timeout=command.timeout_s)
            try:
                async for part in call:
                    ids += codec.unpack_ids(part.token_ids)
                    logprobs += codec.unpack_f32(part.logprobs)
                    if part.HasField("finish"):
                        _check_reply(ids, logprobs, codec.spans_from_pb(part.finish.spans))
                        return (tuple(ids), tuple(logprobs)), part.finish
            finally:
                call.cancel()
        raise Unavailable("the replica ended the stream without a finish")

    async def abort(self, command: e.AbortGenerate) -> None:
        request = inf.AbortRequest(
            episode=codec.key_to_pb(command.episode),
            request_id=f"{command.episode.id}.{command.turn}.{command.retry}",
        )
        await best_effort(lambda: self._engine(command.replica).Abort(request, timeout=5))

    # -- sandbox -----------------------------------------------------------------------

    async def acquire(self, command: e.AcquireBox) -> e.RouterEvent:
        start, end = self._clocks.start()
        limits = command.limits
        try:
            request = sbx.AcquireBoxRequest(
                episode=codec.key_to_pb(command.episode),
                task=pb.TaskPackage(
                    name=command.task,
                    digest=command.task_digest,
                    archive=await self._archive(command.task_digest),
                ),
                limits=sbx.BoxLimits(
                    memory_bytes=limits.memory_bytes,
                    pids=limits.pids,
                    disk_bytes=limits.disk_bytes,
                    disk_inodes=limits.disk_inodes,
                    output_bytes=limits.output_bytes,
                    cpus=limits.cpus,
                ),
                fresh=command.fresh,
            )

            async def call() -> sbx.AcquireBoxResponse:
                stub = self._host(command.host)
                return await stub.AcquireBox(request, timeout=self._box_start_timeout_s)

            await failpoints.at("router.acquire.before")
            box = await begun(call, f"AcquireBox on {command.host}", self._host_away_s)
            await failpoints.at("router.acquire.after")
        except Fenced:
            raise
        except MusterError as error:
            return e.BoxRefused(
                episode=command.episode,
                host=command.host,
                detail=str(error),
                retryable=isinstance(error, Unavailable | Exhausted),
                network_need="network" in error.field,
            )
        return e.BoxAcquired(command.episode, command.host, box.box, start, end())

    async def exec(self, command: e.Exec) -> e.RouterEvent:
        start, end = self._clocks.start()
        request = sbx.ExecRequest(
            episode=codec.key_to_pb(command.episode),
            box=command.box,
            turn=command.turn,
            command=command.command,
            timeout_s=command.timeout_s,
            after_turn=command.after,
        )
        deadline = command.timeout_s + _SLACK_S

        async def call() -> sbx.ExecResponse:
            await failpoints.at("router.exec.before")
            answer = await self._host(command.host).Exec(request, timeout=deadline)
            await failpoints.at("router.exec.after")
            return answer

        try:
            step = await keyed(call, f"Exec on {command.host}", self._host_away_s)
            limit = codec.limit_from_pb(step.limit)
        except Fenced:
            raise
        except MusterError as error:
            return e.StepFailed(
                command.episode, command.turn, str(error), loss_of(error), command.box
            )
        return e.StepFinished(
            episode=command.episode,
            turn=command.turn,
            exit_code=step.exit_code,
            limit=limit,
            wall_s=_seconds(step.wall_s),
            cpu_s=_seconds(step.cpu_s),
            output=output_text(step.output_head, step.output_tail, step.output_bytes_total),
            box_broken=step.box_broken,
            start_unix_s=start,
            end_unix_s=end(),
            cpu_stall_s=_told(step.cpu_stall_s),
            repeated=step.repeated,
            box=command.box,
        )

    async def verify(self, command: e.Verify) -> e.RouterEvent:
        start, end = self._clocks.start()
        request = sbx.VerifyRequest(
            episode=codec.key_to_pb(command.episode), box=command.box, after_turn=command.after
        )
        deadline = self._verify_queue_s + command.timeout_s + _SLACK_S

        async def call() -> sbx.VerifyResponse:
            return await self._host(command.host).Verify(request, timeout=deadline)

        try:
            await failpoints.at("router.verify.before")
            verdict = await keyed(call, f"Verify on {command.host}", self._host_away_s, 1)
            await failpoints.at("router.verify.after")
            status = codec.verdict_from_pb(verdict.status)
        except Fenced:
            raise
        except MusterError as error:
            return e.VerifyFailed(command.episode, str(error), loss_at_verdict(error))
        return e.VerdictGiven(
            episode=command.episode,
            status=status,
            reward=_reward(verdict.reward),
            detail=verdict.detail,
            start_unix_s=start,
            end_unix_s=end(),
        )

    async def release(self, command: e.ReleaseBox) -> None:
        request = sbx.ReleaseBoxRequest(episode=codec.key_to_pb(command.episode), box=command.box)

        async def call() -> None:
            await failpoints.at("router.release.before")
            await self._host(command.host).ReleaseBox(request, timeout=10)
            await failpoints.at("router.release.after")

        await best_effort(call, self._host_away_s)


def _told(value: float) -> float:
    """A duration that a kernel may not tell: -1 says so, and stays what it is."""
    return value if value == -1.0 else _seconds(value)


def _seconds(value: float) -> float:
    """A duration of another process as a finite number of seconds; journals hold no NaN."""
    return value if math.isfinite(value) and value > 0 else 0.0


def _reward(value: float) -> float:
    """A reward that is no number becomes one that is out of range: it is judged as such."""
    return value if math.isfinite(value) else -1.0


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


async def _claimed(call: Callable[[], Awaitable[R]], who: str) -> R | None:
    """Its answer when it knows; Fenced is raised: then we are a former owner ourselves."""
    try:
        with rpc.calling(f"claiming {who}"):
            return await call()
    except Fenced:
        raise
    except MusterError as error:
        _log.info("%s is not claimed yet: %s", who, error)
        return None
