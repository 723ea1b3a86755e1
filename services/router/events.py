"""What the router's machine hears (events, past tense) and decides (commands, imperative).

Owns: the carriers only. Promise: all are plain data, so a journal of events replays to equal
commands. Token ids stay in the driver's conversations; here are texts, counts and times.
`*_unix_s` are wall times of the router, for records; the machine's own time is `now`.
"""

from __future__ import annotations

import msgspec

from muster.types import (
    EpisodeKey,
    Fate,
    FinishReason,
    Limits,
    OutcomeLabel,
    SamplingParams,
    StateInterval,
    StepLimit,
    Value,
    VerdictStatus,
)


class TaskInfo(Value, frozen=True):
    """What the router needs to know of a task; its files travel by digest."""

    name: str
    digest: str
    instruction: str
    threshold: float = 1.0
    max_turns: int = 0  # 0: the router's own limit
    episode_timeout_s: float = 0.0  # 0: the router's own limit
    verify_timeout_s: float = 60.0


class JobSpec(Value, frozen=True):
    """One submitted task set."""

    id: str
    tasks: tuple[TaskInfo, ...]
    groups: int
    group_size: int
    sampling: SamplingParams
    submitted_unix_s: float


class Replica(Value, frozen=True):
    """A live inference replica."""

    id: str
    address: str


class Host(Value, frozen=True):
    """A live sandbox host."""

    id: str
    address: str


class Message(Value, frozen=True):
    """One chat message; user text may hold anything a box printed."""

    role: str
    text: str


class SiblingRestored(Value, frozen=True):
    """What the streams say of a sibling: its next attempt, or its last label when it ended."""

    attempt: int
    label: OutcomeLabel | None = None
    turns: int = 0


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of all events."""


class JobSubmitted(Event, frozen=True):
    job: JobSpec


class JobCancelled(Event, frozen=True):
    job: str


class GroupRestored(Event, frozen=True):
    """After a restart: a group that a former owner opened."""

    group: str
    job: str
    index: int
    siblings: tuple[SiblingRestored, ...]


class RecoveryEnded(Event, frozen=True):
    """Everything durable has been told; launching may begin."""


class VersionPublished(Event, frozen=True):
    """`step` is the optimizer step that made it; 0 for the base model."""

    version: int
    step: int


class BatchTrained(Event, frozen=True):
    step: int


class FateRecorded(Event, frozen=True):
    """`step` is the batch that trained the group, 0 for a filtered one."""

    group: str
    fate: Fate
    step: int = 0


class ReplicasListed(Event, frozen=True):
    replicas: tuple[Replica, ...]


class HostsListed(Event, frozen=True):
    hosts: tuple[Host, ...]


class GroupRecorded(Event, frozen=True):
    group: str


class BoxAcquired(Event, frozen=True):
    episode: EpisodeKey
    host: str
    box: str
    start_unix_s: float
    end_unix_s: float


class BoxRefused(Event, frozen=True):
    episode: EpisodeKey
    host: str
    detail: str
    retryable: bool
    network_need: bool = False


class Generated(Event, frozen=True):
    episode: EpisodeKey
    turn: int
    text: str
    finish: FinishReason
    prompt_tokens: int
    sampled_tokens: int
    start_unix_s: float
    queue_s: float
    prefill_s: float
    end_unix_s: float


class GenerateFailed(Event, frozen=True):
    episode: EpisodeKey
    turn: int
    replica: str
    detail: str


class ContextFull(Event, frozen=True):
    """The context leaves no room for a single sampled token."""

    episode: EpisodeKey
    turn: int


class StepFinished(Event, frozen=True):
    episode: EpisodeKey
    turn: int
    exit_code: int
    limit: StepLimit
    wall_s: float
    cpu_s: float
    output: str
    box_broken: bool
    start_unix_s: float
    end_unix_s: float


class StepFailed(Event, frozen=True):
    """The result of the step cannot be learned: the episode is relaunched, not guessed."""

    episode: EpisodeKey
    turn: int
    detail: str


class TurnRecorded(Event, frozen=True):
    episode: EpisodeKey
    turn: int


class VerdictGiven(Event, frozen=True):
    episode: EpisodeKey
    status: VerdictStatus
    reward: float
    detail: str
    start_unix_s: float
    end_unix_s: float


class VerifyFailed(Event, frozen=True):
    episode: EpisodeKey
    detail: str


class EpisodeRecorded(Event, frozen=True):
    episode: EpisodeKey


class Tick(Event, frozen=True):
    """Time passed; drives deadlines and retries."""


RouterEvent = (
    JobSubmitted
    | JobCancelled
    | GroupRestored
    | RecoveryEnded
    | VersionPublished
    | BatchTrained
    | FateRecorded
    | ReplicasListed
    | HostsListed
    | GroupRecorded
    | BoxAcquired
    | BoxRefused
    | Generated
    | GenerateFailed
    | ContextFull
    | StepFinished
    | StepFailed
    | TurnRecorded
    | VerdictGiven
    | VerifyFailed
    | EpisodeRecorded
    | Tick
)


EpisodeEvent = (
    BoxAcquired
    | BoxRefused
    | Generated
    | GenerateFailed
    | ContextFull
    | StepFinished
    | StepFailed
    | TurnRecorded
    | VerdictGiven
    | VerifyFailed
)


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


class AcquireBox(Command, frozen=True):
    """→ BoxAcquired or BoxRefused."""

    episode: EpisodeKey
    host: str
    task: str
    task_digest: str
    limits: Limits


class Generate(Command, frozen=True):
    """Append `messages` to the conversation and sample a reply → Generated or GenerateFailed.

    `retry` > 0 asks for the same turn again: the messages are then already appended.
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


class AbortGenerate(Command, frozen=True):
    """Stop a request whose episode is over; no event."""

    episode: EpisodeKey
    replica: str
    turn: int
    retry: int


class Exec(Command, frozen=True):
    """→ StepFinished or StepFailed."""

    episode: EpisodeKey
    host: str
    box: str
    turn: int
    command: str
    timeout_s: float


class RecordTurn(Command, frozen=True):
    """Append TurnFinished with the turn's tokens → TurnRecorded."""

    episode: EpisodeKey
    turn: int
    replica: str
    command: str
    exit_code: int
    intervals: tuple[StateInterval, ...]


class Verify(Command, frozen=True):
    """→ VerdictGiven or VerifyFailed."""

    episode: EpisodeKey
    host: str
    box: str
    timeout_s: float


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


RouterCommand = (
    OpenGroup
    | AcquireBox
    | Generate
    | AbortGenerate
    | Exec
    | RecordTurn
    | Verify
    | RecordEpisode
    | ReleaseBox
    | DropConversation
)
