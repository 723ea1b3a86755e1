"""The router's calls to replicas and hosts: one command in, one event out.

Owns: conversations' tokens, the figures of their newest replies, which request is asked of each
episode. Promise: an expected failure becomes an event; a reply of a request that was aborted or
asked for again elsewhere enters nothing, whenever it comes; an Exec whose answer was lost is asked
for again under the same key, so it never runs twice, and also of the successor of a host whose
service went away. Does not cover: what is decided on the events, the calls to replicas themselves
(replicas.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc
import msgspec

from muster import codec, failpoints
from muster.errors import Exhausted, Fenced, MusterError, Unavailable
from muster.replay import output_text
from muster.types import EpisodeKey, FinishReason, Segment
from muster.v1 import common_pb2 as pb
from muster.v1 import sandbox_pb2 as sbx
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub
from services.router import chat
from services.router import events as e
from services.router.adapters.channels import Channels
from services.router.adapters.clocks import Clocks
from services.router.adapters.reach import begun, best_effort, keyed, loss_at_verdict, loss_of
from services.router.adapters.replicas import ReplicaCalls, Reply, claiming
from services.router.adapters.replies import reward, seconds, told_of, told_s
from services.router.adapters.restore import TurnUsage
from services.router.adapters.tokens import Tokens
from services.router.context import Parts
from services.router.conversation import ChatCodec, Conversation

if TYPE_CHECKING:  # this name is in the generated stubs only
    from muster.v1.sandbox_pb2_grpc import SandboxServiceAsyncStub

_CLAIM_S = 2.0
_SLACK_S = 15.0  # over a limit that the other side enforces itself
_NOT_SERVING = "replica.state"  # the field by which a replica says so
_CHARACTERS = 3  # of a token of what commands print, about
_GLUE_TOKENS = 16  # around an observation, about


class _Asked:
    """The request whose answer an episode waits for; `replied`: it is in the conversation."""

    def __init__(self, turn: int, retry: int):
        self.turn, self.retry, self.replied = turn, retry, False


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
        block_tokens: int = 128,
    ):
        """`verify_queue_s`: how long a verification may wait for a place on its host.

        `host_away_s`: how long a sandbox host may be away before its boxes count as lost.
        `block_tokens`: of the router's index of cached prefixes.
        """
        self._host_away_s = host_away_s
        self._codec, self._archive = chat_codec, archive
        self._box_start_timeout_s, self._verify_queue_s = box_start_timeout_s, verify_queue_s
        self._clocks = clocks or Clocks()
        self._block_tokens = block_tokens
        self._channels = Channels()
        self.replicas = ReplicaCalls(self._channels, chat_codec)
        self.tokens = Tokens(chat_codec, block_tokens)
        self._conversations: dict[str, Conversation] = {}
        self._asked: dict[str, _Asked] = {}  # by episode id
        self.usage: dict[str, TurnUsage] = {}  # episode id → of its newest reply

    async def close(self) -> None:
        await self._channels.close()

    def conversation(self, episode: EpisodeKey) -> Conversation:
        found = self._conversations.get(episode.id)
        if found is None:
            found = self._conversations[episode.id] = self._new()
        return found

    def _new(self) -> Conversation:
        return Conversation(self._codec, self._block_tokens)

    def text(self, ids: Sequence[int]) -> str:
        """Text of sampled ids."""
        return self._codec.decode(tuple(ids))

    async def prompt(self, opening: tuple[e.Message, ...]) -> tuple[int, tuple[int, ...]]:
        """See restore.Conversations."""
        made = await self.tokens.opening(opening)
        return len(made.ids), made.blocks

    def restore(
        self,
        episode: str,
        opening: tuple[e.Message, ...],
        turns: Sequence[Sequence[Segment]],
        answers: Sequence[e.Message],
        usage: TurnUsage,
    ) -> None:
        """Take an episode over from a former router (restore.Conversations)."""
        conversation = self._new()
        conversation.restore(opening, turns, answers)
        self._conversations[episode], self.usage[episode] = conversation, usage

    def drop(self, episode: EpisodeKey) -> None:
        for kept in (self._conversations, self.usage, self._asked):
            kept.pop(episode.id, None)
        self.tokens.drop(episode.id)

    def addresses_are(self, addresses: Mapping[str, str], now: float) -> list[grpc.aio.Channel]:
        """Take the announced addresses; answers the channels that nobody needs any more."""
        return self._channels.addresses_are(addresses, now)

    def _host(self, host: str) -> SandboxServiceAsyncStub:
        stub: SandboxServiceAsyncStub = self._channels.stub(host, SandboxServiceStub)
        return stub

    # -- taking over -------------------------------------------------------------------

    async def claim_host(self, run: str, host: str, owner_epoch: int) -> e.BoxesFound | None:
        """Make a host refuse every older owner: its living boxes; None when it does not answer."""
        request = sbx.ClaimHostRequest(run=run, owner_epoch=owner_epoch)
        found = await claiming(lambda: self._host(host).ClaimHost(request, timeout=_CLAIM_S), host)
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
        """Its messages enter the conversation, in any case; a reply while it is waited for."""
        conversation = self._ask(command)
        asked, id_ = self._asked[command.episode.id], command.episode.id
        if command.turn == 0:
            await self.tokens.open(id_, command.messages, conversation)
        context = len(conversation)
        room = min(command.max_tokens, command.context_max - context)
        if room <= 0:
            return e.ContextFull(command.episode, command.turn)
        start, end = self._clocks.start()
        try:
            await failpoints.at("router.generate.before")
            self._check_asked(command, asked)
            sampled, finish = await self._sample(command, conversation.parts, room)
            await failpoints.at("router.generate.after")
            self._check_asked(command, asked)
            reason = codec.finish_from_pb(finish.reason)
            if reason is FinishReason.ABORT:
                raise Unavailable("the replica aborted the request")
            told = told_of(finish, command.sampling, context, len(sampled[0]))
        except Fenced:
            raise
        except MusterError as error:
            full = isinstance(error, Exhausted) or error.field == _NOT_SERVING
            at = (command.episode, command.turn, command.replica)
            return e.GenerateFailed(*at, str(error), full=full, retry=command.retry)
        spans = codec.spans_from_pb(finish.spans)
        text, asked.replied = conversation.reply(*sampled, spans, told), True
        self.usage[id_] = TurnUsage(context, len(sampled[0]), finish.cached_tokens, spans)
        boundary, boundary_tokens = conversation.boundary
        return e.Generated(
            episode=command.episode,
            turn=command.turn,
            text=text,
            finish=reason,
            prompt_tokens=context,
            sampled_tokens=len(sampled[0]),
            start_unix_s=start,
            queue_s=seconds(finish.queue_s),
            prefill_s=seconds(finish.prefill_s),
            decode_s=seconds(finish.decode_s),
            end_unix_s=end(),
            retry=command.retry,
            cached_tokens=min(max(0, finish.cached_tokens), context),
            version=spans[-1].version if spans else -1,
            boundary=boundary,
            boundary_tokens=boundary_tokens,
        )

    def _ask(self, command: e.Generate) -> Conversation:
        """Wait for this request's answer, and for no other of its episode, from now on."""
        conversation = self.conversation(command.episode)
        former = self._asked.get(command.episode.id)
        if former is not None and former.turn == command.turn:
            self._take_back(command.episode, former)
        self._asked[command.episode.id] = _Asked(command.turn, command.retry)
        for message in command.messages if command.turn else ():
            ids = self.tokens.expected(command.episode.id, message.text)
            conversation.observe(message, ids)
        return conversation

    def _take_back(self, episode: EpisodeKey, asked: _Asked) -> None:
        """A reply that came just before its request was given up was heard by nobody."""
        if asked.replied:
            self.conversation(episode).take_back()
            self.usage.pop(episode.id, None)

    def _check_asked(self, command: e.Generate, asked: _Asked) -> None:
        """Raise Unavailable when nobody waits for this answer any more."""
        if self._asked.get(command.episode.id) is not asked:
            raise Unavailable(f"turn {command.turn} is no longer asked of {command.replica}")

    async def _sample(self, command: e.Generate, context: Parts, room: int) -> Reply:
        unrouted = self.conversation(command.episode).recorded
        return await self.replicas.sample(command, context, room, unrouted)

    async def abort(self, command: e.AbortGenerate) -> None:
        """Its answer counts no more from this moment on, even where it has just come."""
        asked = self._asked.get(command.episode.id)
        if asked is not None and (asked.turn, asked.retry) == (command.turn, command.retry):
            del self._asked[command.episode.id]
            self._take_back(command.episode, asked)
        await self.replicas.abort(command)

    async def touch(self, episode: EpisodeKey, replica: str) -> None:
        """Keep the context of a conversation in that replica's cache."""
        conversation = self._conversations.get(episode.id)
        if conversation:
            await self.replicas.touch(episode, replica, conversation.packed)

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
                waited_s=command.waited_s,
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
            output = output_text(step.output_head, step.output_tail, step.output_bytes_total)
        except Fenced:
            raise
        except MusterError as error:
            return e.StepFailed(
                command.episode, command.turn, str(error), loss_of(error), command.box
            )
        told = e.StepFinished(
            episode=command.episode,
            turn=command.turn,
            exit_code=step.exit_code,
            limit=limit,
            wall_s=seconds(step.wall_s),
            cpu_s=seconds(step.cpu_s),
            output=output,
            box_broken=step.box_broken,
            start_unix_s=start,
            end_unix_s=end(),
            cpu_stall_s=told_s(step.cpu_stall_s),
            repeated=step.repeated,
            box=command.box,
            output_tokens=_GLUE_TOKENS + len(output) // _CHARACTERS,
        )
        return await self._foreseen(command, told)

    async def _foreseen(self, command: e.Exec, told: e.StepFinished) -> e.StepFinished:
        """Encode what the model will be told of it, while nobody waits for that yet."""
        seen = e.TurnSeen(
            told.turn,
            0,
            0,
            command=command.command,
            exit_code=told.exit_code,
            limit=told.limit,
            wall_s=told.wall_s,
            output=told.output,
        )
        text = chat.answer(seen).text
        ids = await self.tokens.encoded(text)
        if ids is None:
            return told
        if command.episode.id in self._conversations:  # not dropped meanwhile
            self.tokens.expect(command.episode.id, text, ids)
        return msgspec.structs.replace(told, output_tokens=_GLUE_TOKENS + len(ids))

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
            reward=reward(verdict.reward),
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
