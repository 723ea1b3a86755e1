"""Jobs, groups and siblings: what is wanted, what runs, what came of it.

Owns: the bookkeeping of the router's machine. Promise: pure; a sibling has one live attempt at
most; a group's details are dropped once it has a fate and nothing of it runs, the job keeps its
counts. Does not cover: launching (machine.py), the attempt itself (episode.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from muster.types import Fate, OutcomeLabel, Purpose, Value
from services.router.carriers import JobSpec, Resume, SiblingRestored, TaskInfo
from services.router.events import JobTotals
from services.router.prefix import Mark


class Failed(Value, frozen=True):
    """An attempt that infrastructure ended, by its id; `at`: steady seconds, 0 after a restart."""

    episode: str
    label: OutcomeLabel
    at: float = 0.0

    @property
    def told(self) -> str:
        """What happened, for people."""
        detail = f": {self.label.detail}" if self.label.detail else ""
        return f"{self.label.outcome} ({self.label.cause}){detail}"


@dataclass
class Sibling:
    """One place in a group."""

    attempt: int = 0
    label: OutcomeLabel | None = None  # final: no further attempt follows
    running: bool = False
    resume: Resume | None = None  # how far a former router brought this attempt
    started: bool = False  # a former router may have begun it
    failed: Failed | None = None  # its newest attempt that ended, when infrastructure ended it


@dataclass
class Group:
    """One task x siblings."""

    id: str
    job: str
    index: int
    task: TaskInfo
    siblings: list[Sibling]
    recorded: bool = False
    prompt: tuple[int, tuple[Mark, ...]] = (0, ())  # that its siblings share: tokens, marks
    evaluates: bool = False  # it is not for the trainer

    @property
    def complete(self) -> bool:
        return all(s.label is not None for s in self.siblings)

    @property
    def failed(self) -> Failed | None:
        """The newest of its siblings' failures that no valid end has followed."""
        found = [one.failed for one in self.siblings if one.failed is not None]
        return max(found, key=lambda one: one.at, default=None)


class JobState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass
class Job:
    """A task set being worked on."""

    spec: JobSpec
    number: int  # jobs that were submitted before it
    cancelled: bool = False
    opened: int = 0  # the next index never tried
    lost: list[int] = field(default_factory=list)  # tried by a former router, never durable
    complete: int = 0
    trained: int = 0
    filtered: int = 0
    evaluated: int = 0
    episodes_finished: int = 0
    turns: int = 0
    repairs: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    failed: Failed | None = None  # the newest failure by infrastructure, until a valid end

    @property
    def state(self) -> JobState:
        if self.cancelled:
            return JobState.CANCELLED
        return JobState.DONE if self.fated >= self.allowed else JobState.RUNNING

    @property
    def fated(self) -> int:
        """Groups that have a fate."""
        return self.trained + self.filtered + self.evaluated

    def took(self, fate: Fate) -> None:
        """One more of its groups has its fate."""
        self.trained += fate is Fate.TRAINED
        self.filtered += fate is Fate.FILTERED
        self.evaluated += fate is Fate.EVALUATED

    def task_of(self, index: int) -> TaskInfo:
        """Tasks are taken in turn."""
        return self.spec.tasks[index % len(self.spec.tasks)]

    @property
    def allowed(self) -> int:
        """Groups that may be opened: a filtered one is replaced, at most once per group wanted."""
        return self.spec.groups + min(self.filtered, self.spec.groups)

    @property
    def unopened(self) -> bool:
        return bool(self.lost) or self.opened < self.allowed

    def next_index(self) -> int:
        """The group to open next; only while `unopened`."""
        if self.lost:
            return self.lost.pop(0)
        self.opened += 1
        return self.opened - 1

    def finished(self, label: OutcomeLabel, turns: int) -> None:
        """Count an ended attempt."""
        self.episodes_finished += 1
        self.turns += turns
        key = str(label.outcome)
        self.outcomes[key] = self.outcomes.get(key, 0) + 1

    def restored(self, told: SiblingRestored) -> None:
        """Count what a former router brought about in one sibling."""
        for ended in told.earlier:
            self.finished(ended.label, ended.turns)
            self.repairs += ended.replays
        if told.label is not None:
            self.finished(told.label, told.turns)
        self.repairs += told.attempt + told.replays

    def retired(self, totals: JobTotals) -> None:
        """Count what its retired groups add up to."""
        self.trained += totals.trained
        self.filtered += totals.filtered
        self.evaluated += totals.evaluated
        self.episodes_finished += totals.episodes
        self.turns += totals.turns
        self.repairs += totals.repairs
        for outcome, count in totals.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        self.opened = max([self.opened, *(index + 1 for index in totals.indexes_retired)])
        self.complete += len(totals.indexes_retired)


class JobProgress(Value, frozen=True):
    """What people see of a job."""

    job: str
    state: JobState
    groups_total: int
    groups_opened: int
    groups_complete: int
    groups_trained: int
    groups_filtered: int
    episodes_running: int
    episodes_finished: int
    turns: int
    repairs: int
    outcomes: dict[str, int]
    policy_version: int
    waiting_for: str
    groups_evaluated: int = 0
    purpose: Purpose = Purpose.TRAIN
