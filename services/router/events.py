"""What the router's machine hears: events, past tense.

Owns: the events, and the names `Event | Command | carrier` under which the router knows all three
kinds. Promise: all are plain data, so a journal of events replays to equal commands.
`*_unix_s` are wall times of the router, for records; the machine's own time is `now`.
Does not cover: what is decided (commands.py), what they carry (carriers.py).
"""

from __future__ import annotations

import msgspec

from muster.types import EpisodeKey, Fate, FinishReason, StepLimit, VerdictStatus
from services.router.carriers import Ended as Ended
from services.router.carriers import Host as Host
from services.router.carriers import IntentSeen as IntentSeen
from services.router.carriers import JobSpec as JobSpec
from services.router.carriers import Living as Living
from services.router.carriers import Loss as Loss
from services.router.carriers import Message as Message
from services.router.carriers import Replica as Replica
from services.router.carriers import Resume as Resume
from services.router.carriers import SiblingRestored as SiblingRestored
from services.router.carriers import TaskInfo as TaskInfo
from services.router.carriers import TurnSeen as TurnSeen
from services.router.commands import AbortGenerate as AbortGenerate
from services.router.commands import AcquireBox as AcquireBox
from services.router.commands import Command as Command
from services.router.commands import DropConversation as DropConversation
from services.router.commands import Exec as Exec
from services.router.commands import Generate as Generate
from services.router.commands import OpenGroup as OpenGroup
from services.router.commands import ProbeReplica as ProbeReplica
from services.router.commands import RecordEpisode as RecordEpisode
from services.router.commands import RecordIntent as RecordIntent
from services.router.commands import RecordRestored as RecordRestored
from services.router.commands import RecordTurn as RecordTurn
from services.router.commands import ReleaseBox as ReleaseBox
from services.router.commands import RouterCommand as RouterCommand
from services.router.commands import TellStall as TellStall
from services.router.commands import Touch as Touch
from services.router.commands import TracedCommand as TracedCommand
from services.router.commands import Verify as Verify


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of all events."""


class JobSubmitted(Event, frozen=True):
    job: JobSpec


class JobCancelled(Event, frozen=True):
    job: str


class GroupRestored(Event, frozen=True):
    """After a restart: a group that a former owner opened. Its prompt as in GroupRecorded, when
    anything of it may still run."""

    group: str
    job: str
    index: int
    siblings: tuple[SiblingRestored, ...]
    prompt_tokens: int = 0
    prompt_blocks: tuple[int, ...] = ()


class JobTotals(Event, frozen=True):
    """After a restart: what a job's retired groups, named by index, add up to."""

    job: str
    trained: int
    filtered: int
    episodes: int
    turns: int
    repairs: int
    outcomes: dict[str, int]
    indexes_retired: tuple[int, ...]
    evaluated: int = 0


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


class ReplicaTold(Event, frozen=True):
    """What a replica said when it was asked for a credit on its KV cache.

    `life` names its process. `credit_tokens` may be filled until `ttl_s` from now. `steps`: of its
    engine since its start.
    """

    replica: str
    life: str
    version: int
    serving: bool
    credit_tokens: int
    ttl_s: float
    block_size: int
    running: int = 0
    waiting: int = 0
    steps: int = 0
    detail: str = ""
    updating: bool = False  # weights are being applied: its engine stands still meanwhile
    trip_s: float = 0.0  # from the question to this answer; 0: unknown


class ReplicaSilent(Event, frozen=True):
    """It did not answer when it was asked for a credit."""

    replica: str
    detail: str


class ReplicaProbed(Event, frozen=True):
    """The end of a ProbeReplica. `took_s`: seconds until it had answered. `full`: it had no place
    for the probe, which says neither that it is well nor that it is not."""

    replica: str
    life: str
    passed: bool
    detail: str = ""
    took_s: float = 0.0
    full: bool = False


class HostsListed(Event, frozen=True):
    hosts: tuple[Host, ...]


class BoxesFound(Event, frozen=True):
    """A host knows this owner now; the boxes that live there."""

    host: str
    boxes: tuple[Living, ...]


class GroupRecorded(Event, frozen=True):
    """`prompt_blocks`: chain hashes of the whole blocks of the prompt that its siblings share, one
    per `prefix_block_tokens`; `prompt_tokens`: all of it."""

    group: str
    prompt_tokens: int = 0
    prompt_blocks: tuple[int, ...] = ()


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
    retry: int = 0  # as in the Generate that it answers
    cached_tokens: int = 0  # of the prompt, as the engine reports them
    version: int = -1  # of the newest sampled token; -1: unknown
    boundary: int = 0  # chain hash of the context with the reply, up to its last whole block …
    boundary_tokens: int = 0  # … which ends here; 0: unknown
    decode_s: float = -1.0  # as the engine says; below 0: unknown


class GenerateFailed(Event, frozen=True):
    episode: EpisodeKey
    turn: int
    replica: str
    detail: str
    full: bool = False  # it is well and takes no request now: another may, or it may later
    retry: int = 0  # as in the Generate that it answers


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
    cpu_stall_s: float = 0.0  # below 0 where the kernel does not tell
    repeated: bool = False  # the box had kept the result of an earlier call
    box: str = ""
    output_tokens: int = 0  # about as many as the observation will have


class StepFailed(Event, frozen=True):
    """The result of the step cannot be learned: the box is rebuilt, or the episode relaunched."""

    episode: EpisodeKey
    turn: int
    detail: str
    loss: Loss = Loss.UNKNOWN
    box: str = ""


class IntentRecorded(Event, frozen=True):
    """What is about to run is durable."""

    episode: EpisodeKey
    turn: int


class RestoredRecorded(Event, frozen=True):
    """That the episode goes on in another box is durable."""

    episode: EpisodeKey
    repair: int


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
    loss: Loss = Loss.UNKNOWN


class EpisodeRecorded(Event, frozen=True):
    episode: EpisodeKey


class MemoryTold(Event, frozen=True):
    """Why Redis's memory stops launches; empty when it does not."""

    problem: str


class Tick(Event, frozen=True):
    """Time passed; drives deadlines and retries."""


RouterEvent = (
    JobSubmitted
    | JobCancelled
    | GroupRestored
    | JobTotals
    | RecoveryEnded
    | VersionPublished
    | BatchTrained
    | FateRecorded
    | ReplicasListed
    | ReplicaTold
    | ReplicaSilent
    | ReplicaProbed
    | HostsListed
    | BoxesFound
    | GroupRecorded
    | BoxAcquired
    | BoxRefused
    | Generated
    | GenerateFailed
    | ContextFull
    | StepFinished
    | StepFailed
    | IntentRecorded
    | TurnRecorded
    | RestoredRecorded
    | VerdictGiven
    | VerifyFailed
    | EpisodeRecorded
    | MemoryTold
    | Tick
)


ReplicaEvent = ReplicaTold | ReplicaSilent | ReplicaProbed

ActedEvent = (
    IntentRecorded
    | StepFinished
    | StepFailed
    | TurnRecorded
    | RestoredRecorded
    | VerdictGiven
    | VerifyFailed
)


EpisodeEvent = BoxAcquired | BoxRefused | Generated | GenerateFailed | ContextFull | ActedEvent
