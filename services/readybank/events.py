"""What the bank's machine hears (events, past tense) and decides (commands, imperative).

Owns: the carriers and rules only. Promise: all are plain data, so a journal of events replays to
equal commands. `at_unix_s` is wall time, for records and for order; it is the stream's own time of
an entry, so it is the same again after a restart. The machine's own time is `now`.
"""

from __future__ import annotations

import msgspec

from muster.types import EpisodeKey, Fate, OutcomeLabel, SamplingParams, Value, VersionSpan


class BankRules(Value, frozen=True):
    """The machine's whole configuration."""

    valid_min: int = 2  # valid siblings that make a group worth training on
    repairs_max: int = 2  # an invalid label of attempt >= this is final, as for the router
    zero_variance: str = "train"  # or "filter": what becomes of groups without contrast
    version_wait_s: float = 30.0  # how long a group is held for a version not yet announced
    unacknowledged_max: int = 4  # batches that one trainer may hold without acknowledging
    stall_s: float = 60.0  # a lease that saw no progress so long is told of


class BatchMember(Value, frozen=True):
    """A group in a batch, and the attempt that counts for each sibling, in sibling order."""

    group: str
    attempts: tuple[int, ...]


class Batch(Value, frozen=True):
    """The frozen composition of one step; its id is (run, step)."""

    step: int
    members: tuple[BatchMember, ...]
    asked_unix_s: float
    complete_unix_s: float  # when the last of its groups became complete
    trainer_epoch: int
    policy_version: int  # newest published when it was frozen


class FateRecord(Value, frozen=True):
    """The end of a group. `step` is 0 when it was filtered."""

    group: str
    fate: Fate
    step: int = 0
    reason: str = ""


class LeasedSibling(Value, frozen=True):
    """The attempt that counts; no payloads when its label is not valid."""

    sibling: int
    attempt: int
    label: OutcomeLabel
    payload_keys: tuple[str, ...]


class LeasedGroup(Value, frozen=True):
    """All siblings of a group, in order."""

    group: str
    task: str
    sampling: SamplingParams
    siblings: tuple[LeasedSibling, ...]


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of all events."""


class GroupOpened(Event, frozen=True):
    group: str
    job: str
    task: str
    group_size: int
    sampling: SamplingParams
    owner_epoch: int
    at_unix_s: float


class TurnRecorded(Event, frozen=True):
    episode: EpisodeKey
    turn: int
    payload_key: str
    sampled_tokens: int
    spans: tuple[VersionSpan, ...]
    at_unix_s: float


class EpisodeRecorded(Event, frozen=True):
    episode: EpisodeKey
    turns: int
    at_unix_s: float


class LabelRecorded(Event, frozen=True):
    episode: EpisodeKey
    label: OutcomeLabel
    at_unix_s: float


class VersionSeen(Event, frozen=True):
    """A version of the run's lineage is durable, or (also) published."""

    version: int
    parent: int
    published: bool


class JobCancelled(Event, frozen=True):
    job: str


class TrainerRegistered(Event, frozen=True):
    """`last_batch`: the batch of `last_durable_step` as the trainer's checkpoint keeps it."""

    epoch: int
    last_durable_step: int
    call: str
    last_batch: Batch | None = None


class LeaseAsked(Event, frozen=True):
    epoch: int
    step: int
    groups: int
    call: str
    at_unix_s: float


class LeaseGone(Event, frozen=True):
    """The caller hung up or its deadline passed."""

    call: str


class AckAsked(Event, frozen=True):
    epoch: int
    step: int
    call: str


class BatchFrozen(Event, frozen=True):
    """The composition of this step is durable."""

    step: int


class BatchTrained(Event, frozen=True):
    """The end of this step and the fates of its groups are durable."""

    step: int


class BatchRestored(Event, frozen=True):
    """At start, before any event of a group: a batch that a former incarnation wrote."""

    batch: Batch
    trained: bool


class FateRestored(Event, frozen=True):
    """At start, before any event of a group."""

    group: str
    fate: Fate


class TrainerEpochRestored(Event, frozen=True):
    """At start: the newest trainer epoch that was ever handed out."""

    epoch: int


class EntryLeftOut(Event, frozen=True):
    """An entry of a stream could not be read, so nothing of it counts."""

    stream: str
    id: str


class Tick(Event, frozen=True):
    """Time passed."""


BankEvent = (
    GroupOpened
    | TurnRecorded
    | EpisodeRecorded
    | LabelRecorded
    | VersionSeen
    | JobCancelled
    | TrainerRegistered
    | LeaseAsked
    | LeaseGone
    | AckAsked
    | BatchFrozen
    | BatchTrained
    | BatchRestored
    | FateRestored
    | TrainerEpochRestored
    | EntryLeftOut
    | Tick
)


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base of all commands."""


class WriteFrozen(Command, frozen=True):
    """→ BatchFrozen, once durable."""

    batch: Batch


class WriteTrained(Command, frozen=True):
    """→ BatchTrained, once durable."""

    batch: Batch
    fates: tuple[FateRecord, ...]


class WriteFate(Command, frozen=True):
    """A group was filtered; no event."""

    fate: FateRecord


class SendBatch(Command, frozen=True):
    """Answer a lease: the header, then one message per sibling."""

    call: str
    batch: Batch
    groups: tuple[LeasedGroup, ...]


class AnswerRegistered(Command, frozen=True):
    call: str
    steps_unseen: tuple[int, ...]
    next_step: int


class AnswerAcknowledged(Command, frozen=True):
    call: str
    groups_trained: int


class RefuseCall(Command, frozen=True):
    """`fenced`: the caller was replaced; else the call came at the wrong time."""

    call: str
    problem: str
    field: str
    value: str
    way_out: str
    fenced: bool = False


class TellStall(Command, frozen=True):
    """A lease waits and nothing moves: say for whom."""

    problem: str


BankCommand = (
    WriteFrozen
    | WriteTrained
    | WriteFate
    | SendBatch
    | AnswerRegistered
    | AnswerAcknowledged
    | RefuseCall
    | TellStall
)
