"""What the router's commands become in the world: calls to replicas and hosts, one event back.

Owns: the same shell as services/router/adapters/calls.py, over modelled lines; the conversations
are the real ones. Promise: an expected failure becomes an event, Fenced ends the router. Does not
cover: appends (router.py), decisions (services/router/machine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from muster.errors import Exhausted, Fenced, MusterError, NotFound, Unavailable
from muster.replay import output_text
from muster.types import EpisodeKey, Segment
from services.inference.replica import STATE_FIELD
from services.router import events as e
from services.router.adapters.clocks import Clocks
from services.router.adapters.reach import Line, cut, loss_at_verdict, loss_of, reached
from services.router.adapters.restore import TurnUsage
from services.router.conversation import Conversation
from services.sandbox.ledger import StepRecord
from sim.asked import ReplicaCalls
from sim.engine import Replica, Request, Sample
from sim.host import Host
from sim.led import Led
from sim.models import Model
from sim.net import Serve
from sim.process import Process
from sim.watch import Watch
from sim.work import CODEC, blocks

Tell = Callable[[e.RouterEvent], None]
Tell_ = Callable[[Any], None]
_BOX_START_S = 60.0
_SLACK_S = 15.0
_CLAIM_S = 5.0
_AWAY_S = 20.0  # router.host_away_s
_PAUSE_S = 0.5


class Calls:
    """Of one router incarnation. `durations` tells how long a task's step takes."""

    def __init__(
        self,
        router: Led,
        model: Model,
        task_of: Callable[[str], str],
        tell: Tell,
        watch: Watch,
        block: int,
    ):
        self._watch, self._block = watch, block
        self.tell = tell
        self.router, self.net, self.shared = router, router.net, router.shared
        self.model, self._task_of = model, task_of
        self.clocks = Clocks(router.wall, lambda: router.world.now)
        self.usage: dict[str, TurnUsage] = {}
        self.replicas = ReplicaCalls(router, self.fenced)
        self._newest: dict[str, Request] = {}  # episode → the request that may still be answered
        self.conversations: dict[str, Conversation] = {}

    def conversation(self, episode: EpisodeKey) -> Conversation:
        return self.conversations.setdefault(episode.id, Conversation(CODEC, self._block))

    def text(self, ids: Sequence[int]) -> str:
        """Text of sampled ids."""
        return CODEC.decode(tuple(ids))

    async def prompt(self, opening: tuple[e.Message, ...]) -> tuple[int, tuple[int, ...]]:
        """See restore.Conversations."""
        conversation = Conversation(CODEC)
        conversation.open(opening)
        ids = tuple(conversation.context)
        return len(ids), blocks(ids, self._block)

    def restore(
        self,
        episode: str,
        opening: tuple[e.Message, ...],
        turns: Sequence[Sequence[Segment]],
        answers: Sequence[e.Message],
        usage: TurnUsage,
    ) -> None:
        """Take an episode over (restore.Conversations)."""
        conversation = Conversation(CODEC, self._block)
        conversation.restore(opening, turns, answers)
        self.conversations[episode], self.usage[episode] = conversation, usage

    def drop(self, episode: EpisodeKey) -> None:
        self.conversations.pop(episode.id, None)
        self.usage.pop(episode.id, None)
        self._newest.pop(episode.id, None)

    def _peer(self, name: str) -> Process:
        return self.shared.processes[name]

    def fenced(self, found: Any) -> bool:
        """A newer router has spoken to a peer: this one ends."""
        if isinstance(found, Fenced):
            self.router.exit("fenced by a peer")
        return isinstance(found, Fenced)

    def claim(self, name: str, run: str, epoch: int, hear: Callable[[bool], None]) -> None:
        """Make a peer refuse every older owner; hear of the boxes that live there."""
        peer = self._peer(name)

        def serve(respond: Callable[[Any], None]) -> None:
            if isinstance(peer, Host):
                peer.claim(run, epoch, respond)
            elif isinstance(peer, Replica):
                peer.claim(epoch, respond)

        def heard(found: Any) -> None:
            if self.fenced(found):
                return
            hear(not isinstance(found, MusterError))
            if isinstance(found, dict):
                boxes = [
                    e.Living(replace(key, owner_epoch=epoch), box, key.owner_epoch)
                    for box, key in found.items()
                ]
                self.tell(e.BoxesFound(name, tuple(boxes)))

        op = "ClaimHost" if isinstance(peer, Host) else "ClaimReplica"
        self.net.call(self.router, peer, op, serve, heard, _CLAIM_S)

    # inference

    def generate(self, command: e.Generate, tell: Tell) -> None:
        conversation = self.conversation(command.episode)
        if command.turn == 0 and command.messages:
            conversation.open(command.messages)
        else:
            for message in command.messages:
                conversation.observe(message)
        context = tuple(conversation.context)
        if min(command.max_tokens, command.context_max - len(context)) <= 0:
            tell(e.ContextFull(command.episode, command.turn))
            return
        (start, end), replica = self.clocks.start(), self._peer(command.replica)
        assert isinstance(replica, Replica)
        request = (command.episode.id, command.turn, command.retry)
        self._watch.sent(command, context, self.router.world.now)
        self._newest[command.episode.id] = request

        def heard(found: Any) -> None:
            if self.fenced(found):
                return
            at = (command.episode, command.turn, command.replica)
            if not self._wanted(request):
                tell(e.GenerateFailed(*at, "it is no longer asked", retry=command.retry))
            elif isinstance(found, Sample):
                tell(self._replied(command, conversation, found, (start, end())))
            else:
                full = isinstance(found, Exhausted) or found.field == STATE_FIELD
                tell(e.GenerateFailed(*at, str(found), full=full, retry=command.retry))

        seed = command.sampling.seed
        of = (command.turn, command.retry)
        self.net.call(
            self.router,
            replica,
            "Generate",
            lambda respond: replica.generate(command.episode, of, context, seed, respond),
            heard,
            command.timeout_s,
        )

    def _replied(
        self,
        command: e.Generate,
        conversation: Conversation,
        found: Sample,
        span: tuple[float, float],
    ) -> e.Generated:
        """A reply enters its conversation; `span`: from when to when, by the router's clock."""
        segment, prompt = found.segment, len(conversation.context)
        sampled = len(segment.token_ids)
        text = conversation.reply(segment.token_ids, segment.logprobs, segment.spans)
        request = (command.episode.id, command.turn, command.retry)
        version = segment.spans[-1].version
        self._watch.replied(request, tuple(conversation.context), version)
        if self.conversations.get(command.episode.id) is conversation:
            self.usage[command.episode.id] = TurnUsage(prompt, sampled, found.cached, segment.spans)
        boundary, boundary_tokens = conversation.boundary
        return e.Generated(
            episode=command.episode,
            turn=command.turn,
            text=text,
            finish=found.finish,
            prompt_tokens=prompt,
            sampled_tokens=sampled,
            start_unix_s=span[0],
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=found.decode_s,
            end_unix_s=span[1],
            retry=command.retry,
            cached_tokens=found.cached,
            version=version,
            boundary=boundary,
            boundary_tokens=boundary_tokens,
        )

    def _wanted(self, request: Request) -> bool:
        """Nobody has given it up, or asked anew."""
        return self._newest.get(request[0]) == request

    def abort(self, command: e.AbortGenerate) -> None:
        """Its answer enters no conversation, whenever it comes."""
        request = (command.episode.id, command.turn, command.retry)
        self._watch.gave_up(command)
        if self._wanted(request):
            del self._newest[command.episode.id]
        replica = self._peer(command.replica)
        assert isinstance(replica, Replica)
        serve: Serve = lambda respond: replica.abort(request, respond)  # noqa: E731
        self.net.call(self.router, replica, "Abort", serve, lambda _: None, _CLAIM_S)

    def touch(self, command: e.Touch) -> None:
        """Its context is used, so that it is not the next to go."""
        conversation = self.conversations.get(command.episode.id)
        if conversation is None:
            return
        replica, context = self._peer(command.replica), tuple(conversation.context)
        assert isinstance(replica, Replica)
        serve: Serve = lambda respond: replica.touch(context, respond)  # noqa: E731
        self.net.call(self.router, replica, "Touch", serve, lambda _: None, _CLAIM_S)

    # sandbox

    def acquire(self, command: e.AcquireBox, tell: Tell) -> None:
        (start, end), host = self.clocks.start(), self._peer(command.host)
        assert isinstance(host, Host)

        def heard(found: Any) -> None:
            if self.fenced(found):
                return
            if isinstance(found, MusterError):
                retryable = isinstance(found, Unavailable | Exhausted)
                tell(e.BoxRefused(command.episode, command.host, str(found), retryable))
                return
            tell(e.BoxAcquired(command.episode, command.host, found, start, end()))

        def serve(respond: Tell_) -> None:
            host.acquire(command.episode, command.fresh, respond)

        def first(found: Any) -> None:
            """As reach.begun has it."""
            if isinstance(found, Unavailable) and cut(found):
                again = lambda: self._keyed(op, host, serve, heard, _BOX_START_S)  # noqa: E731
                self.router.soon(_PAUSE_S, again)
            else:
                heard(found)

        op = "AcquireBox"
        self.net.call(self.router, host, op, serve, first, _BOX_START_S)

    def _keyed(
        self,
        op: str,
        host: Host,
        serve: Serve,
        hear: Tell_,
        seconds: float,
        silent_max: int = 2,
        away_first: Callable[[], object] = lambda: None,
    ) -> None:
        """A keyed call, repeated as reach.keyed has it; `away_first`: nobody was there at first."""
        line, tries = Line(_AWAY_S, silent_max), 0

        def heard(found: Any) -> None:
            nonlocal tries
            tries += 1
            if isinstance(found, Unavailable):
                if tries == 1 and not reached(found):
                    away_first()
                if line.failed(found, self.router.world.now):
                    self.router.soon(_PAUSE_S, ask)
                else:
                    hear(line.verdict(found))
                return
            gone = isinstance(found, NotFound) and loss_of(found) is e.Loss.BOX_GONE
            hear(line.verdict(found) if gone else found)

        def ask() -> None:
            self.net.call(self.router, host, op, serve, heard, seconds)

        ask()

    def exec(self, command: e.Exec, tell: Tell) -> None:
        (start, end), host = self.clocks.start(), self._peer(command.host)
        assert isinstance(host, Host)
        seconds = self._seconds(command)
        life = self.router.life
        wants = (command.episode.id, command.turn, lambda: self.router.life == life)
        host.wanted[command.box] = wants

        def heard(found: Any) -> None:
            host.wanted.pop(command.box, None)
            if self.fenced(found):
                return
            if isinstance(found, MusterError):
                loss = loss_of(found)
                tell(
                    e.StepFailed(
                        command.episode, command.turn, str(found), loss=loss, box=command.box
                    )
                )
                return
            record: StepRecord = found[0]
            seen = record.evidence
            tell(
                e.StepFinished(
                    episode=command.episode,
                    turn=command.turn,
                    exit_code=seen.exit_code,
                    limit=record.limit,
                    wall_s=seen.wall_s,
                    cpu_s=seen.cpu_s,
                    output=output_text(seen.head, seen.tail, len(seen.head)),
                    box_broken=bool(seen.broken),
                    start_unix_s=start,
                    end_unix_s=end(),
                    repeated=found[1],
                    box=command.box,
                    output_tokens=len(CODEC.encode(seen.head.decode(), special=False)),
                )
            )

        call = (command.turn, command.command, seconds, command.after)
        at = (command.episode, command.box, *call)
        self._keyed(
            "Exec",
            host,
            lambda respond: host.execute(*at, respond),
            heard,
            command.timeout_s + _SLACK_S,
            away_first=lambda: host.wanted.pop(command.box, None),  # it had gone by itself
        )

    def _seconds(self, command: e.Exec) -> float:
        model = self.model
        if model.fast_s:
            slow = self._task_of(command.episode.group).endswith("slow")
            return model.slow_s if slow else model.fast_s
        longest = 0.9 * command.timeout_s
        return min(self.router.world.spread("step", model.step_s), longest)

    def verify(self, command: e.Verify, tell: Tell) -> None:
        (start, end), host = self.clocks.start(), self._peer(command.host)
        assert isinstance(host, Host)

        def heard(found: Any) -> None:
            if self.fenced(found):
                return
            if isinstance(found, MusterError):
                tell(e.VerifyFailed(command.episode, str(found), loss=loss_at_verdict(found)))
                return
            verdict = (found.status, found.reward, found.detail)
            tell(e.VerdictGiven(command.episode, *verdict, start, end()))

        self._keyed(
            "Verify",
            host,
            lambda respond: host.verify(command.episode, command.box, command.after, respond),
            heard,
            command.timeout_s + _SLACK_S,
            1,
        )

    def _released(self, found: Any) -> None:
        self.fenced(found)

    def release(self, command: e.ReleaseBox) -> None:
        host = self._peer(command.host)
        assert isinstance(host, Host)
        self._keyed(
            "ReleaseBox",
            host,
            lambda respond: host.release(command.episode, command.box, respond),
            self._released,
            10.0,
        )
