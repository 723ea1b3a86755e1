"""What the router's machine decides: commands, imperative.

Owns: the commands only. Promise: plain data; each names the events that may answer it.
Does not cover: how they are done (driver.py, adapters/).
"""

from __future__ import annotations

import msgspec

from muster.types import (
    EpisodeKey,
    JobPolicy,
    Limits,
    OutcomeLabel,
    Purpose,
    SamplingParams,
    StateInterval,
    StepLimit,
    Waiting,
)
from services.router.carriers import Message


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base of all commands."""


class OpenGroup(Command, frozen=True):
    """Append GroupOpened → GroupRecorded."""

    group: str
    job: str
    task: str
    task_digest: str
    group_size: int
    version: int
    sampling: SamplingParams
    policy: JobPolicy = JobPolicy()
    purpose: Purpose = Purpose.TRAIN


class AcquireBox(Command, frozen=True):
    """→ BoxAcquired or BoxRefused.

    `why`, `terms`: as Picked of hosts.py. `home`: the replica of its seat, "" without one;
    `home_terms`: at launch, tokens given room on the replicas that were thought to have any.
    """

    episode: EpisodeKey
    host: str
    task: str
    task_digest: str
    limits: Limits
    fresh: bool = False  # end whatever box this attempt has on that host
    waited_s: float = 0.0  # for this box, on whatever host
    why: str = ""
    terms: dict[str, float] = {}
    home: str = ""
    home_terms: dict[str, float] = {}


class Generate(Command, frozen=True):
    """Append `messages` to the conversation and sample a reply → Generated or GenerateFailed.

    `retry` > 0 asks for the same turn again: the messages are then already appended.
    `why`: the reason for this replica; `terms`: what each candidate that was weighed was thought to
    cost, seconds or the policy's own unit; of a seat that was kept, or let on after a hold, the
    seconds of its prefill alone. `cached`: tokens of the context thought to be in its cache.
    `held`: why it was held for KV before this turn, as Row.hold_terms has it, and `held_s` for how
    long; empty when it was not.
    """

    episode: EpisodeKey
    replica: str
    turn: int
    retry: int
    messages: tuple[Message, ...]
    max_tokens: int
    context_max: int
    sampling: SamplingParams
    timeout_s: float
    why: str = ""
    terms: dict[str, float] = {}
    cached: int = 0
    held: dict[str, float] = {}


class AbortGenerate(Command, frozen=True):
    """Stop a request whose episode is over; no event."""

    episode: EpisodeKey
    replica: str
    turn: int
    retry: int


class Touch(Command, frozen=True):
    """Ask for one token on the present context and throw it away, so that its cache outlives a dead
    one; no event. Nothing is lost when it is not done."""

    episode: EpisodeKey
    replica: str


class RecordIntent(Command, frozen=True):
    """Append TurnIntended with the turn's tokens, before its command runs → IntentRecorded."""

    episode: EpisodeKey
    turn: int
    replica: str
    command: str
    timeout_s: float
    host: str
    box: str
    intervals: tuple[StateInterval, ...]


class Exec(Command, frozen=True):
    """→ StepFinished or StepFailed."""

    episode: EpisodeKey
    host: str
    box: str
    turn: int
    command: str
    timeout_s: float
    after: int = -1  # the newest turn that ran in this box by the records


class RecordTurn(Command, frozen=True):
    """Append TurnFinished → TurnRecorded. With a command, its tokens stand since the intent."""

    episode: EpisodeKey
    turn: int
    replica: str
    command: str
    exit_code: int
    intervals: tuple[StateInterval, ...]
    limit: StepLimit = StepLimit.NONE
    wall_s: float = 0.0
    cpu_s: float = 0.0
    cpu_stall_s: float = 0.0
    box_broken: bool = False
    output: str = ""
    host: str = ""
    box: str = ""
    resumed: bool = False  # the box had kept the result for a former router


class RecordRestored(Command, frozen=True):
    """Append BoxRestored → RestoredRecorded. `repair` counts from 1 within the attempt."""

    episode: EpisodeKey
    repair: int
    lost_host: str
    lost_box: str
    host: str
    box: str
    turns_replayed: int
    reason: str
    start_unix_s: float
    end_unix_s: float


class Verify(Command, frozen=True):
    """→ VerdictGiven or VerifyFailed."""

    episode: EpisodeKey
    host: str
    box: str
    timeout_s: float
    after: int = -1  # as of Exec


class RecordEpisode(Command, frozen=True):
    """Append EpisodeFinished and its label in one step → EpisodeRecorded."""

    episode: EpisodeKey
    label: OutcomeLabel
    turns: int
    host: str
    intervals: tuple[StateInterval, ...]
    started_unix_s: float
    finished_unix_s: float


class ReleaseBox(Command, frozen=True):
    """No event: a box that cannot be released is reaped by its host when a newer epoch comes."""

    episode: EpisodeKey
    host: str
    box: str


class DropConversation(Command, frozen=True):
    """Forget an episode's tokens."""

    episode: EpisodeKey


class ProbeReplica(Command, frozen=True):
    """A short request to a replica that takes no turn yet → ReplicaProbed.

    `life`: of the process that is to answer.
    """

    replica: str
    life: str
    timeout_s: float


class TellStall(Command, frozen=True):
    """Log what everything waits for; no event."""

    lines: tuple[Waiting, ...]


TracedCommand = (
    OpenGroup
    | AcquireBox
    | Generate
    | AbortGenerate
    | Touch
    | RecordIntent
    | Exec
    | RecordTurn
    | RecordRestored
    | Verify
    | RecordEpisode
    | ReleaseBox
    | DropConversation
)

# TracedCommand: what is done for one group, in its trace.
RouterCommand = TracedCommand | ProbeReplica | TellStall
