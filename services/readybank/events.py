"""What the bank's machine hears (events, past tense) and decides (commands, imperative).

Owns: the carriers and rules only. Promise: all are plain data, so a journal of events replays to
equal commands. `at_unix_s` is wall time, for records and for order; it is the stream's own time of
an entry, so it is the same again after a restart. The machine's own time is `now`.
"""

from __future__ import annotations

import msgspec

from muster.evaluated import EvaluatedGroup
from muster.types import (
    EpisodeKey,
    Fate,
    JobPolicy,
    OutcomeLabel,
    Purpose,
    SamplingParams,
    VersionSpan,
)
from services.readybank import carriers

BankRules = carriers.BankRules
Batch = carriers.Batch
BatchMember = carriers.BatchMember
FateRecord = carriers.FateRecord
GivenBack = carriers.GivenBack
GroupOver = carriers.GroupOver
LeasedGroup = carriers.LeasedGroup
LeasedSibling = carriers.LeasedSibling
Score = carriers.Score
ToScore = carriers.ToScore


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
    opened_at_version: int = 0
    policy: JobPolicy = JobPolicy()
    id: str = ""  # of the entry, here and below; without one nothing is ever retired
    purpose: Purpose = Purpose.TRAIN


class TurnIntended(Event, frozen=True):
    """The tokens of a turn are durable; its step may never have ended."""

    episode: EpisodeKey
    turn: int
    payload_key: str
    at_unix_s: float
    id: str = ""


class TurnRecorded(Event, frozen=True):
    episode: EpisodeKey
    turn: int
    payload_key: str
    sampled_tokens: int
    spans: tuple[VersionSpan, ...]
    at_unix_s: float
    output_key: str = ""
    id: str = ""
    prompt_tokens: int = 0
    replica: str = ""


class EpisodeRecorded(Event, frozen=True):
    episode: EpisodeKey
    turns: int
    at_unix_s: float
    id: str = ""


class LabelRecorded(Event, frozen=True):
    episode: EpisodeKey
    label: OutcomeLabel
    at_unix_s: float
    id: str = ""


class VersionSeen(Event, frozen=True):
    """A version of the run's lineage is durable, or (also) published. `step_kl`: KL(parent‖it) per
    token; None where it was not measured."""

    version: int
    parent: int
    published: bool
    step_kl: float | None = None


class JobCancelled(Event, frozen=True):
    job: str


class TrainerRegistered(Event, frozen=True):
    """`batches`: as the trainer's checkpoint keeps them, of consecutive steps up to
    `last_durable_step`; none when it keeps none.

    `oldest_kept_step`: of the oldest checkpoint; the trainer never goes back further. 0: it may.
    """

    epoch: int
    last_durable_step: int
    call: str
    batches: tuple[Batch, ...] = ()
    oldest_kept_step: int = 0


class LeaseAsked(Event, frozen=True):
    """`former_revision`: of the batch of the step before, as the trainer has it."""

    epoch: int
    step: int
    groups: int
    call: str
    at_unix_s: float
    former_revision: int | None = None


class LeaseGone(Event, frozen=True):
    """The caller hung up or its deadline passed."""

    call: str


class AckAsked(Event, frozen=True):
    epoch: int
    step: int
    call: str
    oldest_kept_step: int = 0
    revision: int | None = None  # of the batch that was trained on


class ReturnAsked(Event, frozen=True):
    """The trainer gives groups of a leased batch back."""

    epoch: int
    step: int
    groups: tuple[GivenBack, ...]
    call: str


class BatchReturned(Event, frozen=True):
    """What stays of this step, and the fates of the groups that were given back, are durable."""

    step: int


class GroupScored(Event, frozen=True):
    """An idle replica has scored these trajectories."""

    group: str
    scores: tuple[Score, ...]


class ScoreMissed(Event, frozen=True):
    """Nobody scored the group, and why."""

    group: str
    why: str


class BatchFrozen(Event, frozen=True):
    """The composition of this step is durable."""

    step: int


class BatchTrained(Event, frozen=True):
    """The end of this step and the fates of its groups are durable."""

    step: int


class FateWritten(Event, frozen=True):
    """The fate of a filtered or evaluated group is durable."""

    group: str


class MarkWritten(Event, frozen=True):
    """It is durable that no step up to this one is ever leased again."""

    step: int


class GroupsRetired(Event, frozen=True):
    """Nothing of these groups is left in Redis but stream entries."""

    groups: tuple[str, ...]


class StreamsTrimmed(Event, frozen=True):
    """As `TrimStreams` asked."""


class MarkRestored(Event, frozen=True):
    """At start, before the batches. `opened`: as in WriteMark."""

    step: int
    opened: tuple[float, ...] = ()


class RetiredRestored(Event, frozen=True):
    """At start, before any event of a group: bit n of `bits` (most significant first) stands for
    group n of the job."""

    job: str
    bits: bytes


class RecoveryEnded(Event, frozen=True):
    """All that was durable when the bank started has been fed."""


class BatchRestored(Event, frozen=True):
    """At start, before any event of a group: a batch that a former incarnation wrote. One that
    lacks groups is topped up when its step is leased."""

    batch: Batch
    trained: bool


class FateRestored(Event, frozen=True):
    """At start, before any event of a group."""

    group: str
    fate: Fate
    reason: str = ""


class TrainerEpochRestored(Event, frozen=True):
    """At start: the newest trainer epoch that was ever handed out."""

    epoch: int


class EntryLeftOut(Event, frozen=True):
    """An entry of a stream could not be read, so nothing of it counts."""

    stream: str
    id: str


class Tick(Event, frozen=True):
    """Time passed."""


Entry = GroupOpened | TurnIntended | TurnRecorded | EpisodeRecorded | LabelRecorded
Asked = TrainerRegistered | LeaseAsked | LeaseGone | AckAsked | ReturnAsked
Done = BatchReturned | BatchFrozen | BatchTrained | FateWritten | MarkWritten
Restored = (
    MarkRestored
    | RetiredRestored
    | RecoveryEnded
    | BatchRestored
    | FateRestored
    | TrainerEpochRestored
)
Heard = (
    VersionSeen
    | JobCancelled
    | GroupScored
    | ScoreMissed
    | GroupsRetired
    | StreamsTrimmed
    | EntryLeftOut
    | Tick
)
BankEvent = Entry | Asked | Done | Restored | Heard


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base of all commands."""


class WriteFrozen(Command, frozen=True):
    """→ BatchFrozen, once durable."""

    batch: Batch


class WriteReturned(Command, frozen=True):
    """Groups were given back: `batch` is what stays. One write. → BatchReturned."""

    batch: Batch
    fates: tuple[FateRecord, ...]


class WriteTrained(Command, frozen=True):
    """→ BatchTrained, once durable."""

    batch: Batch
    fates: tuple[FateRecord, ...]


class WriteFate(Command, frozen=True):
    """A group was filtered, or evaluated: then with what was found out. → FateWritten, once
    durable."""

    fate: FateRecord
    evaluated: EvaluatedGroup | None = None


class WriteMark(Command, frozen=True):
    """No step up to `step` is leased again: the trainer keeps no checkpoint that lacks one.
    → MarkWritten. `opened`: for the newest of these batches, oldest first, when the first of its
    groups was opened (for the choice of batches after a restart)."""

    step: int
    opened: tuple[float, ...]


class RetireGroups(Command, frozen=True):
    """→ GroupsRetired. A group that is named again has had a late entry."""

    groups: tuple[GroupOver, ...]


class TrimStreams(Command, frozen=True):
    """Archive and drop entries below these ids of `events` and `outcomes` ("": none), and what
    is over of the other streams. → StreamsTrimmed."""

    events: str
    outcomes: str
    step: int  # the mark
    version: int  # no group that is not retired refers to an older one


class ScoreGroup(Command, frozen=True):
    """Let an idle replica that serves `version` score the first `tokens_max` tokens of each
    trajectory. → GroupScored or ScoreMissed. One is under way at most."""

    group: str
    version: int
    siblings: tuple[ToScore, ...]
    tokens_max: int


class SendBatch(Command, frozen=True):
    """Answer a lease: the header, then one message per sibling. `returns_left`: how often groups of
    it may be given back."""

    call: str
    batch: Batch
    groups: tuple[LeasedGroup, ...]
    returns_left: int = 0


class AnswerRegistered(Command, frozen=True):
    call: str
    steps_unseen: tuple[int, ...]
    next_step: int


class AnswerAcknowledged(Command, frozen=True):
    call: str
    groups_trained: int


class AnswerReturned(Command, frozen=True):
    """`returned`: of the groups that were named, those that are back."""

    call: str
    returned: int


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


Write = WriteFrozen | WriteReturned | WriteTrained | WriteFate
Clear = WriteMark | RetireGroups | TrimStreams
Answer = SendBatch | AnswerRegistered | AnswerAcknowledged | AnswerReturned | RefuseCall
BankCommand = Write | Clear | Answer | ScoreGroup | TellStall
