"""What the router's events and commands carry: jobs, tasks, peers, what a former router recorded.

Owns: the carriers only. Promise: plain data; token ids stay in the shell's conversations, here
are texts, counts and times. Does not cover: what happens (events.py), what is done (commands.py).
"""

from __future__ import annotations

from enum import StrEnum

from muster.types import (
    EpisodeKey,
    JobPolicy,
    OutcomeLabel,
    Purpose,
    SamplingParams,
    StateInterval,
    StepLimit,
    Value,
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
    builds: bool = False  # its box can be made only where whole Dockerfiles are built


class JobSpec(Value, frozen=True):
    """One submitted task set."""

    id: str
    tasks: tuple[TaskInfo, ...]
    groups: int
    group_size: int
    sampling: SamplingParams
    submitted_unix_s: float
    policy: JobPolicy = JobPolicy()
    purpose: Purpose = Purpose.TRAIN

    @property
    def evaluates(self) -> bool:
        """True when nothing of it is for the trainer."""
        return self.purpose is Purpose.EVALUATE


class Replica(Value, frozen=True):
    """A live inference replica."""

    id: str
    address: str


class Host(Value, frozen=True):
    """A live sandbox host. builds: it builds whole Dockerfiles."""

    id: str
    address: str
    builds: bool = False


class Living(Value, frozen=True):
    """A box that lives on a host; `episode` under today's owner, `former_epoch`: who used it."""

    episode: EpisodeKey
    box: str
    former_epoch: int


class Message(Value, frozen=True):
    """One chat message; user text may hold anything a box printed."""

    role: str
    text: str


class Loss(StrEnum):
    """What is known when the result of a step, or a verdict, cannot be had."""

    UNKNOWN = "unknown"  # the box may be well: nothing is guessed
    BOX_GONE = "box_gone"  # the box was gone before the call reached it
    BOX_KILLED = "box_killed"  # box or host went while the call was in flight


class IntentSeen(Value, frozen=True):
    """A reply whose command was about to run; `turn` counts from 0. Times in seconds."""

    turn: int
    command: str
    timeout_s: float
    prompt_tokens: int
    sampled_tokens: int
    replica: str = ""
    intervals: tuple[StateInterval, ...] = ()


class TurnSeen(Value, frozen=True):
    """One finished turn as the streams hold it; without a command when the reply had none."""

    turn: int
    prompt_tokens: int
    sampled_tokens: int
    replica: str = ""
    intervals: tuple[StateInterval, ...] = ()
    done: bool = False  # the reply said that the task is complete
    command: str = ""
    timeout_s: float = 0.0
    exit_code: int = 0
    limit: StepLimit = StepLimit.NONE
    wall_s: float = 0.0
    cpu_s: float = 0.0
    cpu_stall_s: float = 0.0
    box_broken: bool = False
    output: str = ""


class Resume(Value, frozen=True):
    """An attempt that a former router left unfinished, and how far it is durable.

    `host` and `box` are the newest that a record names. `broken`: why it cannot go on (a record
    is lost), empty when it can.
    """

    turns: tuple[TurnSeen, ...] = ()
    intent: IntentSeen | None = None
    host: str = ""
    box: str = ""
    replays: int = 0
    broken: str = ""


class Ended(Value, frozen=True):
    """An attempt that has its label; `replays`: boxes rebuilt within it."""

    label: OutcomeLabel
    turns: int = 0
    replays: int = 0


class SiblingRestored(Value, frozen=True):
    """What the streams say of a sibling.

    `attempt` is the one that runs next, or, with `label`, the one that ended for good. `resume`:
    how far that attempt is. `started`: a former router may have begun it. `earlier`: the attempts
    before it that have a label.
    """

    attempt: int
    label: OutcomeLabel | None = None
    turns: int = 0
    resume: Resume | None = None
    started: bool = False
    earlier: tuple[Ended, ...] = ()
    replays: int = 0  # of the attempt named above
