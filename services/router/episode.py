"""One attempt as a machine: box → (generate → act → record)* → verify → label.

Owns: the phases of an episode, its budgets, its evidence. Promise: pure; each turn is recorded
before the next begins; a result that cannot be learned ends the attempt as infrastructure
failure instead of being guessed; time that Muster itself made the model wait is not charged to
its budget. Does not cover: which sibling runs (machine.py), tokens (conversation.py).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from muster.outcome import End, Evidence, Failure, Verdict, judge, needs_rerun, verifiable
from muster.types import (
    EpisodeKey,
    EpisodeState,
    OutcomeLabel,
    SamplingParams,
    StateInterval,
    StepLimit,
)
from services.router import chat
from services.router import events as e
from services.router.fleet import Fleet
from services.router.rules import RouterRules


class Phase(StrEnum):
    """What the episode waits for."""

    BOX = "box"
    HOLD = "hold"  # a replica, or the time of a retry
    GENERATE = "generate"
    STEP = "step"
    RECORD = "record"
    VERIFY = "verify"
    FINISH = "finish"
    OVER = "over"


class Episode:
    """State of one attempt. Every `on_*` takes an event of this attempt and answers commands."""

    def __init__(
        self,
        key: EpisodeKey,
        task: e.TaskInfo,
        sampling: SamplingParams,
        rules: RouterRules,
    ):
        self.key, self.task, self.rules = key, task, rules
        self.sampling = sampling
        self.phase = Phase.BOX
        self.turns_max = task.max_turns or rules.turns_max
        self.turn = 0
        self.turns_recorded = 0
        self.host = self.box = self.replica = ""
        self.label: OutcomeLabel | None = None
        self.started_unix_s = self._last_unix_s = 0.0
        self._retry = self._retries = 0
        self._wake_at: float | None = None
        self._held_since = 0.0
        self._held = False  # the turn had to wait, or was asked for again
        self._spent_s = 0.0  # time in which the model acted: its tokens and its commands
        self._budget_s = min(
            task.episode_timeout_s or rules.episode_timeout_s, rules.episode_timeout_s
        )
        self._messages = chat.opening(task.instruction)
        self._intervals: list[StateInterval] = []
        self._command, self._exit_code = "", 0
        self._context = self._tokens = self._actions = self._unparseable = 0
        self._cpu_s = 0.0
        self._limit = StepLimit.NONE
        self._verdicts: tuple[Verdict, ...] = ()
        self._end: End | None = None
        self._failure, self._detail = Failure.NONE, ""

    @property
    def id(self) -> str:
        return self.key.id

    # -- box ---------------------------------------------------------------------------

    def start(self, fleet: Fleet, now: float) -> list[e.RouterCommand]:
        """Ask a host for a box; wait when there is none."""
        self.host = fleet.pick_host(now)
        if not self.host:
            self._wake_at = now + self.rules.retry_after_s
            return []
        self._wake_at = None
        return [
            e.AcquireBox(self.key, self.host, self.task.name, self.task.digest, self.rules.limits)
        ]

    def on_box(self, event: e.BoxAcquired, fleet: Fleet, now: float) -> list[e.RouterCommand]:
        if self.phase is not Phase.BOX:
            return [e.ReleaseBox(event.episode, event.host, event.box)]
        self.box, self.host, self._retries = event.box, event.host, 0
        self.started_unix_s = event.start_unix_s
        self._spend(EpisodeState.BOX_START, event.start_unix_s, event.end_unix_s)
        return self._generate(fleet, now)

    def on_box_refused(
        self, event: e.BoxRefused, fleet: Fleet, now: float
    ) -> list[e.RouterCommand]:
        if self.phase is not Phase.BOX or self._wake_at is not None:
            return []  # no request is under way that this could answer
        fleet.box_gone(event.host)
        fleet.host_failed(event.host, now)
        self._retries += 1
        if event.network_need:
            return self._lose(Failure.NETWORK_NEED, event.detail)
        if event.retryable and self._retries <= self.rules.box_retries_max:
            self._wake_at = now + self.rules.retry_after_s
            return []
        return self._lose(Failure.BOX_START, event.detail)

    # -- generate ----------------------------------------------------------------------

    def _generate(self, fleet: Fleet, now: float) -> list[e.RouterCommand]:
        room = min(
            self.rules.turn_tokens_max,
            self.rules.episode_tokens_max - self._tokens,
            self.rules.context_tokens_max - self._context,
        )
        choice = fleet.place(self.id, self._context, now)
        if not choice.replica:
            return self._hold(now)
        self.phase, self.replica, self._wake_at = Phase.GENERATE, choice.replica, None
        return [
            e.Generate(
                episode=self.key,
                replica=self.replica,
                turn=self.turn,
                retry=self._retry,
                messages=() if self._retry else self._messages,
                max_tokens=max(room, 1),
                context_max=self.rules.context_tokens_max,
                sampling=self._sampling_of_turn(),
                timeout_s=self.rules.generate_timeout_s,
            )
        ]

    def _sampling_of_turn(self) -> SamplingParams:
        """A seed for each turn: an engine starts a request's noise afresh from its seed."""
        seed = mix(self.sampling.seed, self.turn)
        return msgspec.structs.replace(self.sampling, seed=seed)

    def _hold(self, now: float) -> list[e.RouterCommand]:
        if self.phase is not Phase.HOLD:
            self.phase, self._held_since, self._held = Phase.HOLD, now, True
        self._wake_at = now + self.rules.retry_after_s
        if now - self._held_since > self.rules.hold_max_s:
            return self._lose(Failure.ENGINE, f"no replica for {self.rules.hold_max_s} s")
        return []

    def on_generated(self, event: e.Generated, fleet: Fleet) -> list[e.RouterCommand]:
        if self.phase is not Phase.GENERATE or event.turn != self.turn:
            return []
        fleet.replied(self.replica)
        self._retry = self._retries = 0
        self._tokens += event.sampled_tokens
        self._context = event.prompt_tokens + event.sampled_tokens
        self._clock(event)
        reply = chat.parse(event.text, event.finish)
        if reply.command:
            self._command, self.phase = reply.command, Phase.STEP
            return self._exec()
        self._command, self._exit_code = "", 0
        self._messages = (e.Message("user", chat.FORMAT_ERROR),)
        self._unparseable = 0 if reply.done else self._unparseable + 1
        if reply.done:
            self._end = End.DONE
        elif self._unparseable >= self.rules.unparseable_max:
            self._end = End.UNPARSEABLE
        return self._record(event.end_unix_s)

    def _exec(self) -> list[e.RouterCommand]:
        """The command that the reply asked for, within what is left of the budget."""
        left = max(self._budget_s - self._spent_s, 0.1)
        return [
            e.Exec(
                self.key,
                self.host,
                self.box,
                self.turn,
                self._command,
                min(self.rules.step_timeout_s, left),
            )
        ]

    def on_generate_failed(
        self, event: e.GenerateFailed, fleet: Fleet, now: float
    ) -> list[e.RouterCommand]:
        if self.phase is not Phase.GENERATE or event.turn != self.turn:
            return []
        fleet.replied(event.replica)
        fleet.failed(event.replica, now)
        self._retry += 1
        self._retries += 1
        self._detail = event.detail
        if self._retries > self.rules.generate_retries_max and fleet.has_replica:
            return self._lose(Failure.ENGINE, event.detail)
        commands = self._hold(now)
        if self.label is None:  # it does wait
            # A replica that died is listed for some seconds more: the retries must outlast that.
            pause_s = self.rules.retry_after_s * 2 ** (self._retries - 1)
            self._wake_at = now + min(pause_s, self.rules.retry_max_s)
        return commands

    def on_context_full(self, event: e.ContextFull, fleet: Fleet) -> list[e.RouterCommand]:
        if self.phase is not Phase.GENERATE or event.turn != self.turn:
            return []
        fleet.replied(self.replica)
        return self._stop(End.CONTEXT)

    # -- act ---------------------------------------------------------------------------

    def on_step(self, event: e.StepFinished) -> list[e.RouterCommand]:
        if self.phase is not Phase.STEP or event.turn != self.turn:
            return []
        self._spend(EpisodeState.TOOL, event.start_unix_s, event.end_unix_s)
        self._actions += 1
        self._unparseable = 0
        self._cpu_s += event.cpu_s
        self._spent_s += event.wall_s
        self._limit = event.limit
        self._exit_code = event.exit_code
        if event.box_broken:
            self._end, self._detail = End.BOX_BROKEN, event.output[-200:]
        text = chat.observation(event.exit_code, event.wall_s, event.output, event.limit)
        self._messages = (e.Message("user", text),)
        return self._record(event.end_unix_s)

    def on_step_failed(self, event: e.StepFailed) -> list[e.RouterCommand]:
        if self.phase is not Phase.STEP or event.turn != self.turn:
            return []
        return self._lose(Failure.HOST_LOST, event.detail)

    # -- record ------------------------------------------------------------------------

    def _record(self, at_unix_s: float) -> list[e.RouterCommand]:
        self.phase, self._last_unix_s = Phase.RECORD, at_unix_s
        intervals, self._intervals = tuple(self._intervals), []
        return [
            e.RecordTurn(
                self.key, self.turn, self.replica, self._command, self._exit_code, intervals
            )
        ]

    def on_recorded(self, event: e.TurnRecorded, fleet: Fleet, now: float) -> list[e.RouterCommand]:
        if self.phase is not Phase.RECORD or event.turn != self.turn:
            return []
        self.turn += 1
        self.turns_recorded = self.turn
        if self._end is None and self.turn >= self.turns_max:
            self._end = End.TURNS
        if self._end is None and self._tokens >= self.rules.episode_tokens_max:
            self._end = End.TOKENS
        if self._end is None and self._spent_s >= self._budget_s:
            self._end = End.TIME
        if self._end is not None:
            return self._stop(self._end)
        return self._generate(fleet, now)

    # -- end ---------------------------------------------------------------------------

    def _stop(self, end: End) -> list[e.RouterCommand]:
        self._end, self._retries = end, 0
        if verifiable(end):
            return self._verify()
        return self._finish()

    def _verify(self) -> list[e.RouterCommand]:
        self.phase, self._wake_at = Phase.VERIFY, None
        return [e.Verify(self.key, self.host, self.box, self.task.verify_timeout_s)]

    def on_verdict(self, event: e.VerdictGiven) -> list[e.RouterCommand]:
        if self.phase is not Phase.VERIFY:
            return []
        self._spend(EpisodeState.VERIFY, event.start_unix_s, event.end_unix_s)
        verdict = Verdict(event.status, event.reward, event.detail)
        self._verdicts = (*self._verdicts, verdict)
        if needs_rerun(verdict) and len(self._verdicts) < 2:
            return self._verify()
        return self._finish()

    def on_verify_failed(self, event: e.VerifyFailed) -> list[e.RouterCommand]:
        if self.phase is not Phase.VERIFY:
            return []
        self._retries += 1
        if self._retries <= self.rules.verify_retries_max:
            return self._verify()
        return self._lose(Failure.SERVICE_CALL, event.detail)

    def _lose(self, failure: Failure, detail: str) -> list[e.RouterCommand]:
        """Something that is not the model's doing ended the attempt."""
        self._end, self._failure, self._detail = End.INFRA, failure, detail
        return self._finish()

    def _finish(self) -> list[e.RouterCommand]:
        self.phase, self._wake_at = Phase.FINISH, None
        wall_s = max(self._last_unix_s - self.started_unix_s, 0.0)
        self.label = judge(
            Evidence(
                end=self._end or End.INFRA,
                failure=self._failure,
                detail=self._detail[:500],
                threshold=self.task.threshold,
                limit=self._limit,
                actions=self._actions,
                tokens=self._tokens,
                verdicts=self._verdicts,
                wall_s=wall_s,
                cpu_s=self._cpu_s,
            )
        )
        intervals, self._intervals = tuple(self._intervals), []
        record = e.RecordEpisode(
            episode=self.key,
            label=self.label,
            turns=self.turns_recorded,
            host=self.host,
            intervals=intervals,
            started_unix_s=self.started_unix_s,
            finished_unix_s=self._last_unix_s,
        )
        return [*self._release(), record]

    def on_finished(self) -> list[e.RouterCommand]:
        """The label is durable."""
        self.phase = Phase.OVER
        return [e.DropConversation(self.key)]

    def cancel(self, fleet: Fleet) -> list[e.RouterCommand]:
        """Stop at once and leave no record: the job is no longer wanted.

        A box still being started is counted until its answer comes, which then gives it back.
        """
        commands: list[e.RouterCommand] = []
        fleet.session_over(self.id)
        if self.box:
            fleet.box_gone(self.host)
        if self.phase is Phase.GENERATE:
            fleet.replied(self.replica)
            commands.append(e.AbortGenerate(self.key, self.replica, self.turn, self._retry))
        if self.phase is not Phase.FINISH:
            commands += self._release()
        self.phase = Phase.OVER
        return [*commands, e.DropConversation(self.key)]

    def _release(self) -> list[e.RouterCommand]:
        return [e.ReleaseBox(self.key, self.host, self.box)] if self.box else []

    # -- time --------------------------------------------------------------------------

    def on_time(self, fleet: Fleet, now: float) -> list[e.RouterCommand]:
        """Retries that are due, budgets that are used up."""
        if self.phase is Phase.BOX:
            return self.start(fleet, now) if self._due(now) else []
        if self.phase is Phase.HOLD and self._due(now):
            return self._generate(fleet, now)
        return []

    def _due(self, now: float) -> bool:
        return self._wake_at is not None and now >= self._wake_at

    def _spend(self, state: EpisodeState, start: float, end: float) -> None:
        self._last_unix_s = max(self._last_unix_s, end)
        self._intervals.append(StateInterval(state, start, end))

    def _clock(self, event: e.Generated) -> None:
        """Split a request's wall time into queue, prefill and decode as the engine told."""
        start, end = event.start_unix_s, event.end_unix_s
        if self._held and self._last_unix_s < start:
            self._spend(EpisodeState.HOLD, self._last_unix_s, start)
        self._held = False
        queued = min(start + max(event.queue_s, 0.0), end)
        filled = min(queued + max(event.prefill_s, 0.0), end)
        self._spend(EpisodeState.QUEUE, start, queued)
        self._spend(EpisodeState.PREFILL, queued, filled)
        self._spend(EpisodeState.DECODE, filled, end)
        self._spent_s += end - queued


def mix(seed: int, *parts: int) -> int:
    """A seed for each combination of parts, equal in every replay (Knuth's MMIX constants)."""
    for part in parts:
        seed = (seed * 6364136223846793005 + part + 1442695040888963407) % 2**63
    return seed
