"""The order of a trainer's life.

Owns: register → lease → train → save → record → acknowledge → publish → lease … Promise: a batch is
acknowledged only when a checkpoint that contains it is durable, and published only after that; so a
crash between any two steps loses nothing and trains nothing twice: a batch that the checkpoint
contains is only acknowledged when it is leased again. Does not cover: I/O (driver.py).

    Started ─ RecordVersion, Register ─ Registered ─ [AcknowledgeBatch] ─ Publish ─
        Published ─ LeaseBatch
    BatchLeased ─ TrainStep ─ StepTrained ─ SaveCheckpoint ─ CheckpointSaved ─
        RecordVersion, AcknowledgeBatch ─ BatchAcknowledged ─ Publish ─ Published ─ LeaseBatch
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from muster.types import Value
from services.trainer.figures import StepReport
from services.trainer.lineage import NO_PARENT
from services.trainer.ports import ReplicaReport, VersionRecord


class Event(Value, frozen=True, tag=True):
    """What has happened."""


class Started(Event, frozen=True):
    """The newest checkpoint (or the base model: step 0) is loaded.

    `record` is its version record; `next_version` lies above every version of the run.
    """

    step: int
    record: VersionRecord
    next_version: int


class Registered(Event, frozen=True):
    """The bank knows this incarnation; it leases `next_step` next."""

    next_step: int


class BatchLeased(Event, frozen=True):
    """The frozen batch of `step` is here."""

    step: int


class StepTrained(Event, frozen=True):
    """The weights have moved by one step, in memory."""

    report: StepReport


class CheckpointSaved(Event, frozen=True):
    """The step is durable; `record` names its version."""

    step: int
    record: VersionRecord


class BatchAcknowledged(Event, frozen=True):
    """The bank has recorded the fates of `step`."""

    step: int


class Published(Event, frozen=True):
    """A publication ended. `serving` counts replicas that serve the current version."""

    reports: tuple[ReplicaReport, ...]
    serving: int


class ReplicasDue(Event, frozen=True):
    """Time to look for replicas that have missed the current version."""


class StopRequested(Event, frozen=True):
    """The process is asked to end."""


TrainerEvent = (
    Started
    | Registered
    | BatchLeased
    | StepTrained
    | CheckpointSaved
    | BatchAcknowledged
    | Published
    | ReplicasDue
    | StopRequested
)


class Command(Value, frozen=True, tag=True):
    """What is to be done; the commands of one answer are carried out in order."""


class Register(Command, frozen=True):
    """Fence former trainers, tell the bank what is durable."""

    last_durable_step: int


class LeaseBatch(Command, frozen=True):
    """Wait for the batch of `step`."""

    step: int


class TrainStep(Command, frozen=True):
    """Train on the leased batch."""

    step: int


class SaveCheckpoint(Command, frozen=True):
    """Make the step durable as a new version."""

    step: int
    version: int
    parent: int
    report: StepReport


class RecordVersion(Command, frozen=True):
    """Append to the versions stream (written once per version and stage)."""

    record: VersionRecord


class AcknowledgeBatch(Command, frozen=True):
    """Tell the bank that `step` is durable."""

    step: int


class Publish(Command, frozen=True):
    """Bring the current version to every replica that serves another, but those in `skip`."""

    version: int
    parent: int
    skip: tuple[str, ...] = ()


class Halt(Command, frozen=True):
    """End the service; an empty `problem` is an orderly end."""

    problem: str = ""
    way_out: str = ""


MISSED_DUES_MAX = 12
"""With the default of one ReplicasDue in 5 s: a minute."""


class Phase(StrEnum):
    """What the trainer is doing."""

    STARTING = "starting"
    WAITING = "waiting"
    TRAINING = "training"
    SAVING = "saving"
    PUBLISHING = "publishing"
    STOPPED = "stopped"


class Missed(Value, frozen=True):
    """A replica that has not taken the current version: how often in a row it was tried, the error
    of the last try, and at which ReplicasDue it is tried again."""

    tries: int
    report: ReplicaReport
    again: int


class TrainerMachine:
    """See the module. To be read: `phase`, `step` (last durable one), `record` (its version),
    `missed` (by replica). A replica that keeps failing is tried ever more seldom, at last every
    `MISSED_DUES_MAX` ReplicasDue; a new version is tried at once."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.step = 0
        self.record = VersionRecord(0, NO_PARENT, "", "")
        self.missed: dict[str, Missed] = {}
        self._next_version = 1
        self._dues = 0  # ReplicasDue so far
        self._leasing = False  # a lease was asked for and has not come
        self._arrived = 0  # step of a batch that is here and not dealt with
        self._handlers: dict[type[TrainerEvent], Callable[[Any], list[Command]]] = {
            Started: self._on_started,
            Registered: self._on_registered,
            BatchLeased: self._on_leased,
            StepTrained: self._on_trained,
            CheckpointSaved: self._on_saved,
            BatchAcknowledged: self._on_acknowledged,
            Published: self._on_published,
            ReplicasDue: self._on_replicas_due,
            StopRequested: self._on_stop,
        }

    def handle(self, event: TrainerEvent, now: float) -> list[Command]:
        """Commands that follow from `event`; this machine needs no clock."""
        del now
        return [] if self.phase is Phase.STOPPED else self._handlers[type(event)](event)

    def _on_started(self, event: Started) -> list[Command]:
        self.step, self.record = event.step, event.record
        self._next_version = event.next_version
        # The record again: the process may have ended between checkpoint and record.
        return [RecordVersion(event.record), Register(event.step)]

    def _on_registered(self, event: Registered) -> list[Command]:
        next_step = event.next_step
        if next_step > self.step + 1:
            return self._halt(
                f"the bank goes on at step {next_step}, the newest checkpoint is of step "
                f"{self.step}: the batches between would never be trained",
                "restore the newer checkpoints, or use another run name",
            )
        # Registering tells the bank what is durable; a bank that still asks for it is told so.
        return [AcknowledgeBatch(self.step)] if next_step <= self.step else self._publish()

    def _on_leased(self, event: BatchLeased) -> list[Command]:
        self._leasing, self._arrived = False, event.step
        return self._go_on() if self.phase is Phase.WAITING else []

    def _on_acknowledged(self, event: BatchAcknowledged) -> list[Command]:
        del event
        return self._publish()

    def _on_published(self, event: Published) -> list[Command]:
        self._note_missed(event.reports)
        return [*self._record_publication(event), *self._go_on()]

    def _on_replicas_due(self, event: ReplicasDue) -> list[Command]:
        del event
        self._dues += 1
        return self._publish() if self.phase is Phase.WAITING else []

    def _on_stop(self, event: StopRequested) -> list[Command]:
        del event
        return self._halt()

    def _publish(self) -> list[Command]:
        self.phase = Phase.PUBLISHING
        return [Publish(self.record.version, self.record.parent, self._skipped())]

    def _skipped(self) -> tuple[str, ...]:
        return tuple(name for name, known in self.missed.items() if self._dues < known.again)

    def _note_missed(self, reports: tuple[ReplicaReport, ...]) -> None:
        """One that was tried without a report has gone, or serves the version."""
        kept = {name: self.missed[name] for name in self._skipped()}
        for report in reports:
            if report.error:
                known = self.missed.get(report.replica)
                tries = known.tries + 1 if known else 1
                wait = min(2 ** (tries - 1), MISSED_DUES_MAX)
                kept[report.replica] = Missed(tries, report, self._dues + wait)
        self.missed = kept

    def _record_publication(self, event: Published) -> list[Command]:
        served = any(not report.error for report in event.reports)
        # Found served by a former incarnation, which may have ended before the record.
        inherited = event.serving > 0 and self.record.parent != NO_PARENT
        if not served and not inherited:
            return []
        record = replace(self.record, published=True, publications=event.reports)
        return [RecordVersion(record)]

    def _go_on(self) -> list[Command]:
        step, self._arrived = self._arrived, 0
        if not step:
            self.phase = Phase.WAITING
            if self._leasing:
                return []
            self._leasing = True
            return [LeaseBatch(self.step + 1)]
        if step <= self.step:
            self.phase = Phase.SAVING
            return [AcknowledgeBatch(step)]
        if step > self.step + 1:
            return self._halt(
                f"the bank leased step {step} after step {self.step}", "restart the trainer"
            )
        self.phase = Phase.TRAINING
        return [TrainStep(step)]

    def _on_trained(self, event: StepTrained) -> list[Command]:
        report = event.report
        self.phase = Phase.SAVING
        return [
            SaveCheckpoint(
                step=report.step,
                version=self._next_version,
                parent=self.record.version,
                report=report,
            )
        ]

    def _on_saved(self, event: CheckpointSaved) -> list[Command]:
        self.step, self.record = event.step, event.record
        self._next_version = event.record.version + 1
        self.missed = {}
        return [RecordVersion(event.record), AcknowledgeBatch(event.step)]

    def _halt(self, problem: str = "", way_out: str = "") -> list[Command]:
        self.phase = Phase.STOPPED
        return [Halt(problem, way_out)]
