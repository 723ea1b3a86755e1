"""What one attempt has used and shown: tokens, time, measured figures, intervals.

Owns: the counters of an attempt. Promise: pure; rebuilt from the recorded turns they equal those of
an attempt that was never interrupted; time that Muster itself made the model wait is not charged.
Does not cover: what the figures lead to (episode.py, muster.outcome).
"""

from __future__ import annotations

from muster.outcome import starved
from muster.types import EpisodeState, StateInterval, StepLimit
from services.router import events as e

_LINE_S = 1.0  # that a reply may be under way without being told apart from decoding
_MODEL_STATES = (EpisodeState.PREFILL, EpisodeState.DECODE)


class Account:
    """Of one attempt. Times in seconds; `*_unix_s` wall time of the router."""

    def __init__(self) -> None:
        self.tokens = 0  # sampled
        self.context = 0  # tokens of prompt and reply of the newest turn
        self.actions = 0  # commands run
        self.unparseable = 0  # replies in a row that asked for nothing
        self.spent_s = 0.0  # time in which the model acted: its tokens and its commands
        self.cpu_s = self.cpu_stall_s = 0.0
        self.limit = StepLimit.NONE  # of the newest step
        self.starved = False  # the newest step ran out of time on a busy host
        self.started_unix_s = self.last_unix_s = 0.0
        self.intervals: list[StateInterval] = []  # not recorded yet

    @property
    def wall_s(self) -> float:
        return max(self.last_unix_s - self.started_unix_s, 0.0)

    def spend(self, state: EpisodeState, start: float, end: float) -> None:
        self.last_unix_s = max(self.last_unix_s, end)
        self.intervals.append(StateInterval(state, start, end))

    def hold(self, until: float) -> None:
        """From what was last known of it, the episode waited for a part of Muster."""
        if 0.0 < self.last_unix_s < until:
            self.spend(EpisodeState.HOLD, self.last_unix_s, until)

    def take_intervals(self) -> tuple[StateInterval, ...]:
        taken, self.intervals = tuple(self.intervals), []
        return taken

    def reply(self, prompt_tokens: int, sampled_tokens: int) -> None:
        self.tokens += sampled_tokens
        self.context = prompt_tokens + sampled_tokens

    def clock(self, event: e.Generated, *, held: bool) -> None:
        """Split a request's wall time into queue, prefill and decode as the engine told."""
        start, end = event.start_unix_s, event.end_unix_s
        if held:
            self.hold(start)
        queued = min(start + max(event.queue_s, 0.0), end)
        filled = min(queued + max(event.prefill_s, 0.0), end)
        self.spend(EpisodeState.QUEUE, start, queued)
        self.spend(EpisodeState.PREFILL, queued, filled)
        made = min(filled + event.decode_s, end) if event.decode_s >= 0 else end
        made = end if end - made <= _LINE_S else made
        self.spend(EpisodeState.DECODE, filled, made)
        if made < end:  # the reply was there, and this router or the line to it was not
            self.spend(EpisodeState.HOLD, made, end)
        self.spent_s += filled - queued  # summed as restore_reply sums them
        self.spent_s += made - filled

    def said(self, *, done: bool) -> None:
        """A reply without a command."""
        self.unparseable = 0 if done else self.unparseable + 1

    def step(self, step: e.StepFinished | e.TurnSeen) -> None:
        """A command was run."""
        self.actions += 1
        self.unparseable = 0
        self.spent_s += step.wall_s
        self.cpu_s += step.cpu_s
        self.cpu_stall_s += max(step.cpu_stall_s, 0.0)
        self.limit = step.limit
        out_of_time = step.limit is StepLimit.TIME
        self.starved = out_of_time and starved(step.wall_s, step.cpu_s, step.cpu_stall_s)

    def restore_reply(self, seen: e.TurnSeen | e.IntentSeen) -> None:
        """A reply that a former router recorded."""
        self.reply(seen.prompt_tokens, seen.sampled_tokens)
        for interval in seen.intervals:
            self.started_unix_s = self.started_unix_s or interval.start_unix_s
            self.last_unix_s = max(self.last_unix_s, interval.end_unix_s)
            if interval.state in _MODEL_STATES:
                self.spent_s += interval.end_unix_s - interval.start_unix_s

    def restore_turn(self, turn: e.TurnSeen) -> None:
        """A whole turn that a former router recorded."""
        self.restore_reply(turn)
        if turn.command:
            self.step(turn)
        else:
            self.said(done=turn.done)
