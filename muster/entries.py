"""The carriers of a run's record: one per kind of stream entry, and the record itself.

Owns: their fields. Promise: no I/O, no protobuf; times are Unix seconds of the clock of the service
that wrote the entry. Does not cover: reading and decoding (record.py), look-ups (run_index.py).
"""

from __future__ import annotations

from muster.evaluated import EvaluatedGroup
from muster.types import (
    EpisodeKey,
    Fate,
    JobPolicy,
    OutcomeLabel,
    Purpose,
    StateInterval,
    Value,
    VersionSpan,
)


class Opened(Value, frozen=True):
    """A group was opened. Times in Unix seconds, router clock."""

    at: str  # stream id
    key: EpisodeKey
    job: str
    task: str
    group_size: int
    version: int
    opened_unix_s: float
    policy: JobPolicy = JobPolicy()
    purpose: Purpose = Purpose.TRAIN

    @property
    def evaluates(self) -> bool:
        return self.purpose is Purpose.EVALUATE


class Intended(Value, frozen=True):
    """The reply of a turn, and the command that is about to run in a box."""

    at: str
    key: EpisodeKey
    seq: int
    turn: int
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    spans: tuple[VersionSpan, ...]
    replica: str
    intervals: tuple[StateInterval, ...]
    payload_key: str
    command: str
    timeout_s: float
    host: str
    box: str


class Turn(Value, frozen=True):
    """A turn was finished."""

    at: str
    key: EpisodeKey
    seq: int
    turn: int
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    spans: tuple[VersionSpan, ...]
    replica: str
    intervals: tuple[StateInterval, ...]
    payload_key: str = ""
    command: str = ""  # empty: the reply held none
    exit_code: int = 0
    limit: str = ""  # the limit that ended the step
    wall_s: float = 0.0
    cpu_s: float = 0.0
    cpu_stall_s: float = 0.0
    box_broken: bool = False
    host: str = ""
    box: str = ""
    output_key: str = ""
    resumed: bool = False  # a later router read the result that the box had kept


class Restored(Value, frozen=True):
    """A lost box was rebuilt by replay: the episode went on in another one."""

    at: str
    key: EpisodeKey
    repair: int
    lost_host: str
    lost_box: str
    host: str
    box: str
    turns_replayed: int
    reason: str
    start_unix_s: float
    end_unix_s: float


class Finish(Value, frozen=True):
    """An attempt ended."""

    at: str
    key: EpisodeKey
    seq: int
    turns: int
    host: str
    intervals: tuple[StateInterval, ...]
    started_unix_s: float
    finished_unix_s: float


class Labelled(Value, frozen=True):
    """What became of an attempt."""

    at: str
    key: EpisodeKey
    label: OutcomeLabel


class Step(Value, frozen=True):
    """The optimizer step that made a version."""

    step: int
    loss: float
    grad_norm: float
    tokens: int
    groups_with_variance: int
    mismatch_k1: float
    mismatch_k3: float
    mismatch_max_abs: float
    ess_fraction: float
    truncated_share: float
    train_s: float
    ended_unix_s: float = 0.0  # when it was trained, by the trainer's clock; 0: not recorded
    groups_returned: int = 0  # given back by the trainer before it
    predicted_kl: float | None = None  # mean of the bank's bounds on its trajectories …
    measured_kl: float | None = None  # … and of what the trainer found on the same, per token


class PublicationTimes(Value, frozen=True):
    """A version's way to all replicas: from its record until it was begun to be sent (another one
    was under way), from then to the last of them, and the training of later steps in both."""

    waited_s: float = 0.0
    took_s: float = 0.0
    trained_meanwhile_s: float = 0.0


class Publication(Value, frozen=True):
    """A version's way to one replica; seconds."""

    replica: str
    latency_s: float
    pause_s: float
    token_gap_s: float
    receive_s: float
    apply_s: float
    requests_recomputed: int
    tokens_lost: int
    error: str


class Version(Value, frozen=True):
    """A policy version reached a stage: durable, or published."""

    at: str
    version: int
    parent: int
    digest: str
    published: bool
    checkpoint: str
    step_kl: float | None  # None: not measured
    at_unix_s: float
    step: Step | None
    publications: tuple[Publication, ...]
    times: PublicationTimes = PublicationTimes()


class Member(Value, frozen=True):
    """A group of a batch, with the attempt that counts for each sibling."""

    group: str
    attempts: tuple[int, ...]


class Batch(Value, frozen=True):
    """A batch was frozen, or trained, or groups of it were given back (`short`: what stays)."""

    at: str
    step: int
    trained: bool
    members: tuple[Member, ...]
    asked_unix_s: float
    complete_unix_s: float
    trainer_epoch: int
    policy_version: int
    revision: int = 0  # how often groups of it were given back
    returned: tuple[str, ...] = ()  # all that were
    short: bool = False


class FateOf(Value, frozen=True):
    """The end of a group."""

    at: str
    group: str
    fate: Fate
    step: int
    reason: str
    predicted_kl: float | None = None  # the bank's bound on its drift, per token
    scored_kl: float | None = None  # as an idle replica measured it
    measured_kl: float | None = None  # as the trainer did


class EvaluatedOf(Value, frozen=True):
    """What an evaluation found out about a group."""

    at: str
    found: EvaluatedGroup


class Job(Value, frozen=True):
    """A task set was submitted, or cancelled."""

    at: str
    job: str
    groups: int
    group_size: int
    submitted_unix_s: float
    cancelled: bool
    policy: JobPolicy = JobPolicy()
    purpose: Purpose = Purpose.TRAIN


class Dead(Value, frozen=True):
    """An entry that a service could not read and set aside; `of` names it, `why` the reason."""

    at: str
    stream: str
    of: str
    why: str


class Damaged(Value, frozen=True):
    """An entry that says nothing a service could have meant."""

    stream: str
    at: str
    problem: str


class StreamState(Value, frozen=True):
    """What the server itself counts: entries ever added, still there, newest one deleted."""

    stream: str
    added: int
    length: int
    max_deleted: str = "0-0"  # set by XDEL, not by trimming
    on_disk: int = 0  # in the history alone
    last: str = ""  # newest id at the moment of the cut

    @property
    def missing(self) -> int:
        """Entries that are neither on the server nor in the history that was read."""
        return max(0, self.added - self.length - self.on_disk)


class Kept(Value, frozen=True):
    """What the server keeps beside the streams.

    `totals` by job: what its retired groups add up to. `retired` by job: their indexes.
    `payloads`: names of the payload keys ("p:EPISODE.TURN", "o:EPISODE.TURN"); None when they were
    not listed. `retired_after`: as `retired`, read after the payload keys. `fenced`: refused
    writes by role.
    """

    totals: dict[str, dict[str, int]] = {}
    retired: dict[str, frozenset[int]] = {}
    retired_after: dict[str, frozenset[int]] = {}
    payloads: frozenset[str] | None = None
    fenced: dict[str, int] = {}


class RunRecord(Value, frozen=True):
    """All streams of one run. Each tuple is in stream order.

    `whole`: no entry that was trimmed from the server is missing here. Else everything of the
    retired groups has been left out, so that no group stands here in part.
    """

    run: str
    opened: tuple[Opened, ...] = ()
    intended: tuple[Intended, ...] = ()
    turns: tuple[Turn, ...] = ()
    restored: tuple[Restored, ...] = ()
    finished: tuple[Finish, ...] = ()
    labels: tuple[Labelled, ...] = ()
    versions: tuple[Version, ...] = ()
    batches: tuple[Batch, ...] = ()
    fates: tuple[FateOf, ...] = ()
    jobs: tuple[Job, ...] = ()
    evaluated: tuple[EvaluatedOf, ...] = ()
    dead: tuple[Dead, ...] = ()
    damaged: tuple[Damaged, ...] = ()
    streams: tuple[StreamState, ...] = ()
    kept: Kept = Kept()
    whole: bool = True
