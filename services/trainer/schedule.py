"""The order of a trainer's life.

Owns: register → lease → train → save → record → acknowledge → publish → lease … Promise: a batch is
acknowledged only when a checkpoint that contains it is durable; its version is recorded before it
is published; an old checkpoint is deleted only after the bank has answered a call that named the
new oldest one. So a crash between any two steps loses nothing and trains nothing twice in the
lineage of a checkpoint. Does not cover: I/O (driver.py).

    Started ─ RecordVersion, Register ─ Registered ─ [AcknowledgeBatch] ─ Publish ─
        Published ─ PruneCheckpoints, LeaseBatch
    BatchLeased ─ TrainStep ─ StepTrained ─ SaveCheckpoint ─ CheckpointSaved ─ RecordVersion,
        AcknowledgeBatch ─ BatchAcknowledged ─ Publish ─ Published ─ PruneCheckpoints, LeaseBatch

With `checkpoint_every` above 1 the steps between are only sealed: SealVersion ─ VersionSealed ─
RecordVersion, Publish. A crash goes back to the checkpoint; the bank gives the batches since then
again, unchanged and in order, and what is made of them has new numbers. When no batch comes for
`checkpoint_idle_s`, the last step is saved all the same: its groups get their fate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from muster.types import Value
from services.trainer.figures import StepReport
from services.trainer.lineage import NO_PARENT
from services.trainer.ports import ReplicaReport, Stage, VersionRecord


class Event(Value, frozen=True, tag=True):
    """What has happened."""


class Started(Event, frozen=True):
    """The newest checkpoint (or the base model: step 0) is loaded.

    `record` is its version record; `next_version` lies above every version of the run;
    `oldest_kept` is the step of the oldest checkpoint to be kept, 0 while nothing is deleted.
    """

    step: int
    record: VersionRecord
    next_version: int
    oldest_kept: int = 0


class Registered(Event, frozen=True):
    """The bank knows this incarnation; it leases `next_step` next."""

    next_step: int


class BatchLeased(Event, frozen=True):
    """The frozen batch of `step` is here."""

    step: int


class StepTrained(Event, frozen=True):
    """The weights have moved by one step, in memory."""

    report: StepReport


class VersionSealed(Event, frozen=True):
    """The step's weights have their number and digest, in memory."""

    step: int
    record: VersionRecord


class CheckpointSaved(Event, frozen=True):
    """The step is durable; `record` names its version. `oldest_kept`: see Started."""

    step: int
    record: VersionRecord
    oldest_kept: int = 0


class BatchAcknowledged(Event, frozen=True):
    """The bank has recorded the fates of `step`."""

    step: int


class Published(Event, frozen=True):
    """A publication ended. `serving` counts replicas that serve the current version."""

    reports: tuple[ReplicaReport, ...]
    serving: int


class ServerRestarted(Event, frozen=True):
    """The server of the streams is another process: it may have lost its newest records."""


class ReplicasDue(Event, frozen=True):
    """Time to look for replicas that have missed the current version."""


class StopRequested(Event, frozen=True):
    """The process is asked to end."""


TrainerEvent = (
    Started
    | Registered
    | BatchLeased
    | StepTrained
    | VersionSealed
    | CheckpointSaved
    | BatchAcknowledged
    | Published
    | ServerRestarted
    | ReplicasDue
    | StopRequested
)


class Command(Value, frozen=True, tag=True):
    """What is to be done; the commands of one answer are carried out in order."""


class Register(Command, frozen=True):
    """Fence former trainers, tell the bank what is durable and how far back it may be asked."""

    last_durable_step: int
    oldest_kept: int = 0


class LeaseBatch(Command, frozen=True):
    """Wait for the batch of `step`."""

    step: int


class TrainStep(Command, frozen=True):
    """Train on the leased batch."""

    step: int


class SealVersion(Command, frozen=True):
    """Name the step's weights; no checkpoint."""

    step: int
    version: int
    parent: int
    report: StepReport


class SaveCheckpoint(Command, frozen=True):
    """Make the step durable as a version: a new one, or the sealed one that has `digest`."""

    step: int
    version: int
    parent: int
    report: StepReport
    digest: str = ""


class RecordVersion(Command, frozen=True):
    """Append to the versions stream (written once per version and stage)."""

    record: VersionRecord


class AcknowledgeBatch(Command, frozen=True):
    """Tell the bank that `step` and all before it are durable."""

    step: int
    oldest_kept: int = 0


class PruneCheckpoints(Command, frozen=True):
    """Delete the checkpoints of steps below `oldest_kept`: the bank has been told."""

    oldest_kept: int


class Publish(Command, frozen=True):
    """Bring the current version to every replica that serves another, but those in `skip`."""

    version: int
    parent: int
    skip: tuple[str, ...] = ()


class Halt(Command, frozen=True):
    """End the service; an empty `problem` is an orderly end."""

    problem: str = ""
    way_out: str = ""


MISSED_DUES_MAX = 12  # with the default of one ReplicasDue in 5 s: a minute
RECORDED_MAX = 64  # records that can be written again: more than a second brings about


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
    """See the module. To be read: `phase`, `step` (last trained one), `record` (its version),
    `durable` (step of the newest checkpoint), `checkpoint` (its folder), `missed` (by replica).
    A replica that keeps failing is tried ever more seldom, at last every
    `MISSED_DUES_MAX` ReplicasDue; a new version is tried at once."""

    def __init__(self, *, checkpoint_every: int = 1, checkpoint_idle_s: float = 30.0) -> None:
        self.phase = Phase.STARTING
        self.step = self.durable = 0
        self.record, self.checkpoint = VersionRecord(0, NO_PARENT, "", ""), ""
        self._every, self._idle_s = checkpoint_every, checkpoint_idle_s
        self._oldest_kept = self._told_oldest = self._pruned = 0
        self._now = self._asked_at = 0.0
        self.missed: dict[str, Missed] = {}
        self._next_version, self._dues = 1, 0  # dues: ReplicasDue so far
        self._recorded: deque[RecordVersion] = deque(maxlen=RECORDED_MAX)
        self._leasing = False  # a lease was asked for and has not come
        self._arrived = 0  # step of a batch that is here and not dealt with
        self._handlers: dict[type[TrainerEvent], Callable[[Any], list[Command]]] = {
            Started: self._on_started,
            Registered: self._on_registered,
            BatchLeased: self._on_leased,
            StepTrained: self._on_trained,
            VersionSealed: self._on_sealed,
            CheckpointSaved: self._on_saved,
            BatchAcknowledged: self._on_acknowledged,
            Published: self._on_published,
            ServerRestarted: self._on_server_restarted,
            ReplicasDue: self._on_replicas_due,
            StopRequested: self._on_stop,
        }

    def handle(self, event: TrainerEvent, now: float) -> list[Command]:
        """Commands that follow from `event`. `now`: seconds, steady."""
        self._now = now
        commands = [] if self.phase is Phase.STOPPED else self._handlers[type(event)](event)
        self._recorded.extend(c for c in commands if isinstance(c, RecordVersion))
        return commands

    def _on_started(self, event: Started) -> list[Command]:
        self._now_durable(event.step, event.record, event.oldest_kept)
        self._next_version = event.next_version
        # The record again: the process may have ended between checkpoint and record.
        return [RecordVersion(event.record), Register(event.step, event.oldest_kept)]

    def _now_durable(self, step: int, record: VersionRecord, oldest_kept: int) -> None:
        self.step = self.durable = step
        self.record, self.checkpoint = record, record.checkpoint
        self._oldest_kept = oldest_kept

    def _on_registered(self, event: Registered) -> list[Command]:
        next_step = event.next_step
        if next_step > self.step + 1:
            return self._halt(
                f"the bank goes on at step {next_step}, the newest checkpoint is of step "
                f"{self.step}: the batches between would never be trained",
                "restore the newer checkpoints, or use another run name",
            )
        # Registering tells the bank what is durable; a bank that still asks for it is told so.
        self._told_oldest = self._oldest_kept
        return [self._acknowledge()] if next_step <= self.step else self._publish()

    def _acknowledge(self) -> AcknowledgeBatch:
        return AcknowledgeBatch(self.durable, self._oldest_kept)

    def _prune(self) -> list[Command]:
        """Only what the bank has answered for. After the publication: nothing waits for it."""
        if self._told_oldest <= self._pruned:
            return []
        self._pruned = self._told_oldest
        return [PruneCheckpoints(self._pruned)]

    def _on_leased(self, event: BatchLeased) -> list[Command]:
        self._leasing, self._arrived = False, event.step
        return self._go_on() if self.phase is Phase.WAITING else []

    def _on_acknowledged(self, _: BatchAcknowledged) -> list[Command]:
        self._told_oldest = self._oldest_kept
        return self._publish()

    def _on_published(self, event: Published) -> list[Command]:
        self._note_missed(event.reports)
        return [*self._record_publication(event), *self._prune(), *self._go_on()]

    def _on_server_restarted(self, _: ServerRestarted) -> list[Command]:
        """What is there already stays as it is."""
        again: list[Command] = [*self._recorded]
        self._recorded.clear()
        return again

    def _on_replicas_due(self, _: ReplicasDue) -> list[Command]:
        self._dues += 1
        if self.phase is not Phase.WAITING:
            return []
        idle = self._now - self._asked_at >= self._idle_s
        return self._save_sealed() if idle and self.step > self.durable else self._publish()

    def _save_sealed(self) -> list[Command]:
        """Nothing to train on: a good time to make durable what is not."""
        made = self.record
        assert made.report is not None, "a step that is not durable was trained here"
        self.phase = Phase.SAVING
        return [SaveCheckpoint(self.step, made.version, made.parent, made.report, made.digest)]

    def _on_stop(self, _: StopRequested) -> list[Command]:
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
        record = replace(self.record, stage=Stage.PUBLISHED, publications=event.reports)
        return [RecordVersion(record)]

    def _go_on(self) -> list[Command]:
        step, self._arrived = self._arrived, 0
        if not step:
            self.phase = Phase.WAITING
            if self._leasing:
                return []
            self._leasing, self._asked_at = True, self._now
            return [LeaseBatch(self.step + 1)]
        if step <= self.durable:
            self.phase = Phase.SAVING
            return [self._acknowledge()]
        if step != self.step + 1:
            problem = f"the bank leased step {step} after step {self.step}"
            return self._halt(problem, "restart the trainer")
        self.phase = Phase.TRAINING
        return [TrainStep(step)]

    def _on_trained(self, event: StepTrained) -> list[Command]:
        report = event.report
        self.phase = Phase.SAVING
        due = report.step - self.durable >= self._every
        make = SaveCheckpoint if due else SealVersion
        return [make(report.step, self._next_version, self.record.version, report)]

    def _on_sealed(self, event: VersionSealed) -> list[Command]:
        self.step, self.record = event.step, event.record
        self._new_version()
        return [RecordVersion(event.record), *self._publish()]

    def _on_saved(self, event: CheckpointSaved) -> list[Command]:
        self._now_durable(event.step, event.record, event.oldest_kept)
        self._new_version()
        return [RecordVersion(event.record), self._acknowledge()]

    def _new_version(self) -> None:
        if self.record.version >= self._next_version:
            self._next_version = self.record.version + 1
            self.missed = {}

    def _halt(self, problem: str = "", way_out: str = "") -> list[Command]:
        self.phase = Phase.STOPPED
        return [Halt(problem, way_out)]
