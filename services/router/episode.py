"""The turns of an attempt: (sample → intend → act → record)*, and the replay of a lost box.

Owns: the turns, their budgets, going on after a former router. Promise: pure; what is about to run
is durable before it runs, each turn is recorded before the next begins; a lost box is rebuilt by
replay, a result that cannot be learned ends the attempt as infrastructure failure instead of being
guessed; time that Muster itself made the model wait is not charged to its budget. Does not cover:
box and end (attempt.py), requests and waits (sampling.py), which sibling runs (machine.py), tokens
(conversation.py), the counters (account.py), the comparison (rebuild.py).
"""

from __future__ import annotations

from muster.outcome import End, Failure, verifiable
from muster.types import EpisodeState
from services.router import chat
from services.router import events as e
from services.router.attempt import Commands, Given
from services.router.attempt import Phase as Phase
from services.router.fleet import Fleet
from services.router.rebuild import Rebuild, recorded
from services.router.sampling import Sampling


class Episode(Sampling):
    """State of one attempt. Every `on_*` takes an event of this attempt and answers commands."""

    def __init__(self, given: Given):
        super().__init__(given)
        task, rules = given.task, given.rules
        self.turns_max = min(task.max_turns or rules.turns_max, rules.box_steps_max)
        self.command, self.step_timeout_s = "", 0.0
        self._budget_s = min(
            task.episode_timeout_s or rules.episode_timeout_s, rules.episode_timeout_s
        )
        self._turns: list[e.TurnSeen] = []  # finished ones, for a replay
        self._newest_run = -1
        self._output_tokens = 0  # of the newest step, as its event tells
        self._recording: e.TurnSeen | None = None
        self._resumed_turn = -1  # its command may have run under a former router
        self._rebuild: Rebuild | None = None

    def on(self, event: e.EpisodeEvent, fleet: Fleet, now: float) -> Commands:
        """Any event of this attempt."""
        match event:  # the most frequent first
            case e.Generated():
                return self.on_generated(event, fleet, now)
            case e.IntentRecorded():
                return self.on_intended(event)
            case e.StepFinished():
                return self.on_step(event)
            case e.TurnRecorded():
                return self.on_recorded(event, fleet, now)
            case e.BoxAcquired():
                return self.on_box(event, fleet, now)
            case e.BoxRefused():
                return self.on_box_refused(event, fleet, now)
            case _:
                return self._on_rarer(event, fleet, now)

    def _on_rarer(
        self,
        event: e.GenerateFailed
        | e.ContextFull
        | e.StepFailed
        | e.RestoredRecorded
        | e.VerdictGiven
        | e.VerifyFailed,
        fleet: Fleet,
        now: float,
    ) -> Commands:
        match event:
            case e.GenerateFailed():
                return self.on_generate_failed(event, fleet, now)
            case e.ContextFull():
                return self.on_context_full(event, fleet)
            case e.StepFailed():
                return self.on_step_failed(event, fleet, now)
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
            fleet.hosts.adopted(self.host)
        if record.broken:
            self.turns_recorded = len(record.turns)
            return self._lose(Failure.RECORD_LOST, record.broken)
        self._held = True
        for turn in record.turns:
            self.account.restore_turn(turn)
            self._recorded(turn)
        intent = record.intent
        if intent is not None:  # its reply is the newest thing that its cache holds
            self.account.restore_reply(intent)
            self.account.intervals = list(intent.intervals)
            self.replica, self._observed = intent.replica, 0
        fleet.adopt(self._request())
        if intent is None:
            return self._advance(fleet, now)
        self.command, self.step_timeout_s = intent.command, intent.timeout_s
        self._resumed_turn = intent.turn
        return self._exec()

    def _recorded(self, turn: e.TurnSeen) -> None:
        """A turn is durable: what follows from it alone."""
        self._turns.append(turn)
        if turn.command:
            self._newest_run = turn.turn
        self.turn = self.turns_recorded = turn.turn + 1
        self.replica = turn.replica
        self._messages = (chat.answer(turn),)
        # Where nobody counted its tokens: about four characters each.
        self._observed = self._output_tokens or len(turn.output) // 4
        self._output_tokens = 0
        if turn.done:
            self._end = End.DONE
        elif turn.box_broken:
            self._end, self._detail = End.BOX_BROKEN, turn.output[-200:]
        elif self.account.unparseable >= self.rules.unparseable_max:
            self._end = End.UNPARSEABLE

    # -- act ---------------------------------------------------------------------------

    def _said(self, event: e.Generated) -> Commands:
        reply = chat.parse(event.text, event.finish, self.rules.command_bytes_max)
        self.command = reply.command
        if reply.command:
            return self._intend()
        self.account.said(done=reply.done)
        return self._record(self._seen(done=reply.done))

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
        self._output_tokens = event.output_tokens
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

    # -- record ------------------------------------------------------------------------

    def _seen(self, step: e.StepFinished | None = None, *, done: bool = False) -> e.TurnSeen:
        """This turn as it will be recorded."""
        if step is None:
            return e.TurnSeen(self.turn, 0, 0, self.replica, done=done)
        return e.TurnSeen(
            turn=self.turn,
            prompt_tokens=0,
            sampled_tokens=0,
            replica=self.replica,
            done=done,
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
        return self._newest_run

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
