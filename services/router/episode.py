"""The turns of an attempt: (generate → intend → act → record)*, and the replay of a lost box.

Owns: the turns, their budgets, going on after a former router. Promise: pure; what is about to run
is durable before it runs, each turn is recorded before the next begins; a lost box is rebuilt by
replay, a result that cannot be learned ends the attempt as infrastructure failure instead of being
guessed; time that Muster itself made the model wait is not charged to its budget. Does not cover:
box and end (attempt.py), which sibling runs (machine.py), tokens (conversation.py), the counters
(account.py), the comparison (rebuild.py).
"""

from __future__ import annotations

import msgspec

from muster.outcome import End, Failure, verifiable
from muster.types import EpisodeKey, EpisodeState, SamplingParams
from services.router import chat
from services.router import events as e
from services.router.attempt import Attempt, Commands
from services.router.attempt import Phase as Phase
from services.router.fleet import Fleet
from services.router.rebuild import Rebuild, recorded
from services.router.rules import RouterRules


class Episode(Attempt):
    """State of one attempt. Every `on_*` takes an event of this attempt and answers commands."""

    def __init__(
        self,
        key: EpisodeKey,
        task: e.TaskInfo,
        sampling: SamplingParams,
        rules: RouterRules,
        *,
        fresh: bool = False,
        replays_max: int,
    ):
        super().__init__(key, task, rules, fresh=fresh, replays_max=replays_max)
        self.sampling = sampling
        self.turns_max = min(task.max_turns or rules.turns_max, rules.box_steps_max)
        self.command, self.step_timeout_s = "", 0.0
        self._held_since: float | None = None  # since when no replica takes it
        self._full = ""  # the replica that took nothing when it was asked last
        self._held = False  # it had to wait: for a replica, a retry, a router
        self._budget_s = min(
            task.episode_timeout_s or rules.episode_timeout_s, rules.episode_timeout_s
        )
        self._messages = chat.opening(task.instruction)
        self._turns: list[e.TurnSeen] = []  # finished ones, for a replay
        self._recording: e.TurnSeen | None = None
        self._resumed_turn = -1  # its command may have run under a former router
        self._rebuild: Rebuild | None = None

    def on(self, event: e.EpisodeEvent, fleet: Fleet, now: float) -> Commands:
        """Any event of this attempt."""
        match event:
            case e.BoxAcquired():
                return self.on_box(event, fleet, now)
            case e.BoxRefused():
                return self.on_box_refused(event, fleet, now)
            case e.Generated():
                return self.on_generated(event, fleet)
            case e.GenerateFailed():
                return self.on_generate_failed(event, fleet, now)
            case e.ContextFull():
                return self.on_context_full(event, fleet)
            case _:
                return self._on_acted(event, fleet, now)

    def _on_acted(self, event: e.ActedEvent, fleet: Fleet, now: float) -> Commands:
        match event:
            case e.IntentRecorded():
                return self.on_intended(event)
            case e.StepFinished():
                return self.on_step(event)
            case e.StepFailed():
                return self.on_step_failed(event, fleet, now)
            case e.TurnRecorded():
                return self.on_recorded(event, fleet, now)
            case e.RestoredRecorded():
                return self.on_restored(event)
            case e.VerdictGiven():
                return self.on_verdict(event)
            case e.VerifyFailed():
                return self.on_verify_failed(event, fleet, now)

    def _has_box(self, event: e.BoxAcquired, fleet: Fleet, now: float) -> Commands:
        if self._rebuild is None:
            return self._generate(fleet, now)
        self._rebuild.start_unix_s = event.start_unix_s
        self._rebuild.end_unix_s = event.end_unix_s
        return self._replay(self._rebuild)

    # -- after a former router ------------------------------------------------------------

    def resume(self, record: e.Resume, fleet: Fleet, now: float) -> Commands:
        """Go on where the records of this attempt end."""
        self.host, self.box = record.host, record.box
        self.replays = self._rebuilds = record.replays
        if self.box:
            fleet.adopted(self.host)
        if record.broken:
            self.turns_recorded = len(record.turns)
            return self._lose(Failure.RECORD_LOST, record.broken)
        self._held = True
        for turn in record.turns:
            self.account.restore_turn(turn)
            self._recorded(turn)
        if record.intent is None:
            return self._advance(fleet, now)
        intent = record.intent
        self.account.restore_reply(intent)
        self.account.intervals = list(intent.intervals)
        self.replica = intent.replica
        self.command, self.step_timeout_s = intent.command, intent.timeout_s
        self._resumed_turn = intent.turn
        return self._exec()

    def _recorded(self, turn: e.TurnSeen) -> None:
        """A turn is durable: what follows from it alone."""
        self._turns.append(turn)
        self.turn = self.turns_recorded = turn.turn + 1
        self.replica = turn.replica
        self._messages = (chat.answer(turn),)
        if turn.done:
            self._end = End.DONE
        elif turn.box_broken:
            self._end, self._detail = End.BOX_BROKEN, turn.output[-200:]
        elif self.account.unparseable >= self.rules.unparseable_max:
            self._end = End.UNPARSEABLE

    # -- generate ----------------------------------------------------------------------

    def _generate(self, fleet: Fleet, now: float) -> Commands:
        account, rules = self.account, self.rules
        room = min(
            rules.turn_tokens_max,
            rules.episode_tokens_max - account.tokens,
            rules.context_tokens_max - account.context,
        )
        choice = fleet.place(self.id, account.context, now, home=self.replica, avoid=self._full)
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
                context_max=rules.context_tokens_max,
                sampling=self._sampling_of_turn(),
                timeout_s=rules.generate_timeout_s,
            )
        ]

    def _sampling_of_turn(self) -> SamplingParams:
        """A seed for each turn: an engine starts a request's noise afresh from its seed."""
        seed = mix(self.sampling.seed, self.turn)
        return msgspec.structs.replace(self.sampling, seed=seed)

    def _hold(self, now: float) -> Commands:
        self.phase, self._held = Phase.HOLD, True
        if self._held_since is None:
            self._held_since = now
        self._wake_at = now + self.rules.retry_after_s
        if now - self._held_since > self.rules.hold_max_s:
            why = self._detail or "none is there"
            return self._lose(Failure.ENGINE, f"no replica for {self.rules.hold_max_s:g} s: {why}")
        return []

    def on_generated(self, event: e.Generated, fleet: Fleet) -> Commands:
        if self.phase is not Phase.GENERATE or event.turn != self.turn:
            return []
        fleet.replied(self.replica)
        self._retry = self._retries = 0
        self._held_since, self._full, self._detail = None, "", ""
        self.account.reply(event.prompt_tokens, event.sampled_tokens)
        self.account.clock(event, held=self._held)
        self._held = False
        reply = chat.parse(event.text, event.finish, self.rules.command_bytes_max)
        self.command = reply.command
        if reply.command:
            return self._intend()
        self.account.said(done=reply.done)
        return self._record(self._seen(done=reply.done))

    def on_generate_failed(self, event: e.GenerateFailed, fleet: Fleet, now: float) -> Commands:
        if self.phase is not Phase.GENERATE or event.turn != self.turn:
            return []
        fleet.replied(event.replica)
        self._retry += 1
        self._detail = event.detail
        if event.full:  # nothing has failed: only the time of waiting is bounded
            self._full = event.replica
            return self._hold(now)
        fleet.failed(event.replica, now)
        self._retries, self._held_since = self._retries + 1, None
        if self._retries > self.rules.generate_retries_max and fleet.has_replica:
            return self._lose(Failure.ENGINE, event.detail)
        commands = self._hold(now)
        if self.label is None:  # it does wait
            # A replica that died is listed for some seconds more: the retries must outlast that.
            pause_s = self.rules.retry_after_s * 2 ** (self._retries - 1)
            self._wake_at = now + min(pause_s, self.rules.retry_max_s)
        return commands

    def on_context_full(self, event: e.ContextFull, fleet: Fleet) -> Commands:
        if self.phase is not Phase.GENERATE or event.turn != self.turn:
            return []
        fleet.replied(self.replica)
        return self._stop(End.CONTEXT)

    # -- act ---------------------------------------------------------------------------

    def _intend(self) -> Commands:
        """The command that the reply asked for, within what is left of the budget."""
        left = max(self._budget_s - self.account.spent_s, 0.1)
        self.phase, self.step_timeout_s = Phase.INTEND, min(self.rules.step_timeout_s, left)
        return [
            e.RecordIntent(
                episode=self.key,
                turn=self.turn,
                replica=self.replica,
                command=self.command,
                timeout_s=self.step_timeout_s,
                host=self.host,
                box=self.box,
                intervals=tuple(self.account.intervals),
            )
        ]

    def on_intended(self, event: e.IntentRecorded) -> Commands:
        if self.phase is not Phase.INTEND or event.turn != self.turn:
            return []
        return self._exec()

    def _exec(self) -> Commands:
        self.phase, self._wake_at = Phase.STEP, None
        at = (self.key, self.host, self.box, self.turn)
        return [e.Exec(*at, self.command, self.step_timeout_s, self._ran)]

    def on_step(self, event: e.StepFinished) -> Commands:
        if event.box not in ("", self.box):
            return []  # of a box that is given up
        if self.phase is Phase.REPLAY and self._rebuild is not None:
            return self._on_replayed(event, self._rebuild)
        if self.phase is not Phase.STEP or event.turn != self.turn:
            return []
        self._held_until(event.start_unix_s)
        self.account.spend(EpisodeState.TOOL, event.start_unix_s, event.end_unix_s)
        self.account.step(event)
        return self._record(self._seen(event), resumed=event.repeated)

    def on_step_failed(self, event: e.StepFailed, fleet: Fleet, now: float) -> Commands:
        if event.box not in ("", self.box):
            return []
        step = self._rebuild.step if self.phase is Phase.REPLAY and self._rebuild else None
        turn = step.turn if step else self.turn
        if (self.phase is not Phase.STEP and step is None) or event.turn != turn:
            return []
        if event.loss is e.Loss.UNKNOWN:
            return self._lose(Failure.HOST_LOST, event.detail)
        if event.loss is e.Loss.BOX_KILLED and step is None:  # what is replayed has ended once
            self._killed.setdefault(turn, set()).add(self.host)
        return self._restore_box(event.detail, fleet, now)

    def _held_until(self, unix_s: float) -> None:
        if self._held:
            self.account.hold(unix_s)
        self._held = False

    # -- record ------------------------------------------------------------------------

    def _seen(self, step: e.StepFinished | None = None, *, done: bool = False) -> e.TurnSeen:
        """This turn as it will be recorded."""
        said = e.TurnSeen(self.turn, 0, 0, self.replica, done=done)
        if step is None:
            return said
        return msgspec.structs.replace(
            said,
            command=self.command,
            timeout_s=self.step_timeout_s,
            exit_code=step.exit_code,
            limit=step.limit,
            wall_s=step.wall_s,
            cpu_s=step.cpu_s,
            cpu_stall_s=step.cpu_stall_s,
            box_broken=step.box_broken,
            output=step.output,
        )

    def _record(self, turn: e.TurnSeen, *, resumed: bool = False) -> Commands:
        self.phase, self._recording = Phase.RECORD, turn
        return [
            e.RecordTurn(
                episode=self.key,
                turn=turn.turn,
                replica=turn.replica,
                command=turn.command,
                exit_code=turn.exit_code,
                intervals=self.account.take_intervals(),
                limit=turn.limit,
                wall_s=turn.wall_s,
                cpu_s=turn.cpu_s,
                cpu_stall_s=turn.cpu_stall_s,
                box_broken=turn.box_broken,
                output=turn.output,
                host=self.host,
                box=self.box,
                resumed=resumed and self._resumed_turn == turn.turn,
            )
        ]

    def on_recorded(self, event: e.TurnRecorded, fleet: Fleet, now: float) -> Commands:
        turn = self._recording
        if self.phase is not Phase.RECORD or turn is None or event.turn != turn.turn:
            return []
        self._recorded(turn)
        return self._advance(fleet, now)

    def _advance(self, fleet: Fleet, now: float) -> Commands:
        """After a recorded turn: the end, or the next one."""
        if self._end is None and self.turn >= self.turns_max:
            self._end = End.TURNS
        if self._end is None and self.account.tokens >= self.rules.episode_tokens_max:
            self._end = End.TOKENS
        if self._end is None and self.account.spent_s >= self._budget_s:
            self._end = End.TIME
        if self._end is not None:
            return self._stop(self._end)
        return self._generate(fleet, now)

    def _stop(self, end: End) -> Commands:
        self._end, self._retries = end, 0
        if verifiable(end):
            return self._verify()
        return self._finish()

    # -- a lost box --------------------------------------------------------------------

    @property
    def _ran(self) -> int:
        return max((turn.turn for turn in self._turns if turn.command), default=-1)

    def _lost_box(self, reason: str) -> None:
        self._rebuild = Rebuild(recorded(self._turns), self.host, self.box, reason)

    def _replay(self, rebuild: Rebuild) -> Commands:
        step = rebuild.step
        if step is None:
            return [rebuild.record(self.key, self.replays + 1, self.host, self.box)]
        at = (self.key, self.host, self.box, step.turn)
        limit_s = step.timeout_s or self.rules.step_timeout_s
        return [e.Exec(*at, step.command, limit_s, rebuild.ran)]

    def _on_replayed(self, event: e.StepFinished, rebuild: Rebuild) -> Commands:
        if rebuild.step is None or event.turn != rebuild.step.turn:
            return []
        self.account.spend(EpisodeState.BOX_START, event.start_unix_s, event.end_unix_s)
        different = rebuild.saw(event)
        if different:
            return self._lose(Failure.REPLAY_DIFFERS, different)
        return self._replay(rebuild)

    def on_restored(self, event: e.RestoredRecorded) -> Commands:
        if self.phase is not Phase.REPLAY or event.repair != self.replays + 1:
            return []
        self.replays, self._rebuild = event.repair, None
        return self._verify() if self._end is not None else self._exec()

    # -- time --------------------------------------------------------------------------

    def on_time(self, fleet: Fleet, now: float) -> Commands:
        """Retries that are due, budgets that are used up."""
        if not self._due(now):
            return []
        if self._wants_box:
            return self.start(fleet, now)
        return self._generate(fleet, now) if self.phase is Phase.HOLD else []

    def _due(self, now: float) -> bool:
        return self._wake_at is not None and now >= self._wake_at


def mix(seed: int, *parts: int) -> int:
    """A seed for each combination of parts, equal in every replay (Knuth's MMIX constants)."""
    for part in parts:
        seed = (seed * 6364136223846793005 + part + 1442695040888963407) % 2**63
    return seed
