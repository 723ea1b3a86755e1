"""The words of Muster as frozen carriers; also the glossary.

Owns: ids, segments, spans, episode keys, labels. Promise: no I/O, no clock, no protobuf.
Does not cover: the wire (codec.py), the outcome rules (outcome.py).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

_INDEX_DIGITS_MAX = 7  # of a group in its job: a bit field of 1.2 MB


class SegmentKind(StrEnum):
    """What produced a run of tokens."""

    PROMPT = "prompt"
    MODEL = "model"  # sampled by the policy: log-probabilities and version spans
    OBSERVATION = "observation"


class Outcome(StrEnum):
    """The end of one attempt (DESIGN §7)."""

    MODEL_SUCCESS = "model_success"
    MODEL_FAILURE = "model_failure"
    INFRA_FAILURE = "infra_failure"
    UNKNOWN = "unknown"

    @property
    def valid(self) -> bool:
        """True when the attempt may enter a gradient or a group's statistics."""
        return self in (Outcome.MODEL_SUCCESS, Outcome.MODEL_FAILURE)


class EpisodeState(StrEnum):
    """What a sibling is doing; every instant of an episode belongs to one."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    BOX_START = "box_start"
    TOOL = "tool"
    VERIFY = "verify"
    HOLD = "hold"


class Fate(StrEnum):
    """The end of a group."""

    TRAINED = "trained"
    FILTERED = "filtered"
    EVALUATED = "evaluated"  # of an evaluation: run to its end, counted, never leased


class Purpose(StrEnum):
    """What the groups of a job are for."""

    TRAIN = "train"
    EVALUATE = "evaluate"


class StepLimit(StrEnum):
    """Which limit ended a step."""

    NONE = "none"
    TIME = "time"
    MEMORY = "memory"
    PIDS = "pids"
    DISK = "disk"


class VerdictStatus(StrEnum):
    """How a verification ended."""

    REWARDED = "rewarded"
    TIMEOUT = "timeout"
    INVALID = "invalid"  # no verdict, or not finite, or out of range
    SETUP_FAILED = "setup_failed"


class FinishReason(StrEnum):
    """Why sampling stopped."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Value(msgspec.Struct, frozen=True):
    """Base of every immutable carrier."""


class SamplingParams(Value, frozen=True):
    """Sampling transforms; applied on both sides or refused (DESIGN §8)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 turns it off
    seed: int = 0


class EpisodeKey(Value, frozen=True, order=True):
    """One attempt at filling one sibling, under the router that owns it."""

    run: str
    group: str
    sibling: int
    attempt: int
    owner_epoch: int

    @property
    def id(self) -> str:
        """`group.sibling.attempt`, unique within the run."""
        return f"{self.group}.{self.sibling}.{self.attempt}"


class VersionSpan(Value, frozen=True):
    """Sampled tokens [start, end) of a MODEL segment came from `version`."""

    version: int
    start: int
    end: int
    kv_min_version: int


class StateInterval(Value, frozen=True):
    """Wall time (Unix seconds, router clock) spent in one state."""

    state: EpisodeState
    start_unix_s: float
    end_unix_s: float


class RoutedExperts(Value, frozen=True):
    """Where a mixture-of-experts model sent tokens: uint16 ids, [tokens, layers, per_token]."""

    layers: int
    per_token: int
    ids: bytes  # little-endian

    @property
    def tokens(self) -> int:
        """How many tokens it is of."""
        return len(self.ids) // (2 * self.layers * self.per_token)


class SamplingMask(Value, frozen=True):
    """What top-p and top-k left to choose from: `counts[i]` ids for sampled token i, 0 for all."""

    counts: tuple[int, ...]
    token_ids: tuple[int, ...]


class Segment(Value, frozen=True):
    """A run of tokens of one kind; `logprobs` has one entry per token of a MODEL segment.

    `experts` is of every token, `mask` of every token of a MODEL segment; None: not recorded.
    """

    kind: SegmentKind
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    experts: RoutedExperts | None = None
    mask: SamplingMask | None = None


class OutcomeLabel(Value, frozen=True):
    """What became of an attempt, why, and the evidence."""

    outcome: Outcome
    cause: str
    reward: float | None = None
    limit: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    flaky: bool = False
    detail: str = ""
    cpu_stall_s: float = 0.0  # time in which the steps waited for a processor
    replays: int = 0  # boxes rebuilt by replay within this attempt


class JobPolicy(Value, frozen=True):
    """What a job wants done with siblings and groups that are not whole; None: as configured."""

    repairs_max: int | None = None
    valid_min: int | None = None
    zero_variance: str | None = None  # "train" or "filter"
    infra_ceiling: float | None = None

    def repairs(self, default: int) -> int:
        """How often a sibling's attempt, and an attempt's box, is made again."""
        return default if self.repairs_max is None else self.repairs_max


def group_id(job: str, index: int) -> str:
    """The name of a job's group."""
    return f"{job}-{index:05d}"


def job_and_index(group: str) -> tuple[str, int] | None:
    """What `group_id` made a name of; None when it is no such name."""
    job, _, index = group.rpartition("-")
    if job and index.isascii() and index.isdecimal() and len(index) <= _INDEX_DIGITS_MAX:
        return job, int(index)
    return None


class Waiting(Value, frozen=True):
    """One thing that waits: for what, since when, who has to move, what a person would run."""

    subject: str
    state: str
    waits_for: str = ""
    since_unix_s: float = 0.0
    owner: str = ""
    next_command: str = ""


class Limits(Value, frozen=True):
    """What a box may use; bytes, counts. cpus: processors at a time; 0 sets no limit."""

    memory_bytes: int = 256 << 20
    pids: int = 64
    disk_bytes: int = 32 << 20
    disk_inodes: int = 4096
    output_bytes: int = 4096  # kept per step: half head, half tail
    cpus: float = 0.0
