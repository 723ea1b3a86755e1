"""The order of a trainer's life.

Owns: register → lease → train → save → record → acknowledge → lease …, and beside it the
publications. Promise: a batch is acknowledged only when a checkpoint that contains it is durable;
its version is recorded before it is published; an old checkpoint is deleted only after the bank has
answered a call that named the new oldest one. So a crash between any two steps loses nothing and
trains nothing twice in the lineage of a checkpoint. Does not cover: I/O (driver.py), what is
published when (outgoing.py).

    Started ─ RecordVersion, Register ─ Registered ─ Publish …, [AcknowledgeBatch], LeaseBatch
    BatchLeased ─ TrainStep ─ StepTrained ─ SaveCheckpoint ─ CheckpointSaved ─ RecordVersion ─
        VersionRecorded ─ Publish …, AcknowledgeBatch ─ BatchAcknowledged ─ LeaseBatch
    … Published ─ RecordVersion, PruneCheckpoints ─ VersionRecorded ─ [Publish …]

A batch is leased and trained while at most `ahead_max` versions have not ended their publication:
0 (sync): the next step is trained when the last one is published; 1 or more (async): they overlap,
and a trainer that is quicker than the line waits for it. No batch to lease holds up no publication.

With `checkpoint_every` above 1 the steps between are only sealed: SealVersion ─ VersionSealed ─
RecordVersion ─ VersionRecorded ─ Publish …, LeaseBatch. A crash goes back to the checkpoint; the
bank gives the batches since then again, unchanged and in order, and what is made of them has new
numbers. When no batch comes for `checkpoint_idle_s`, the last step is saved all the same: its
groups get their fate. After GroupsReturned (returns.py) the batch of the step is leased again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from services.trainer.events import (
    AcknowledgeBatch,
    BatchAcknowledged,
    BatchLeased,
    CheckpointSaved,
    Command,
    Event,
    Halt,
    LeaseBatch,
    PruneCheckpoints,
    Publish,
    Published,
    RecordVersion,
    Register,
    Registered,
    ReplicasDue,
    SaveCheckpoint,
    SealVersion,
    ServerRestarted,
    Started,
    StepTrained,
    StopRequested,
    TrainerEvent,
    TrainStep,
    VersionRecorded,
    VersionSealed,
)
from services.trainer.lineage import NO_PARENT
from services.trainer.outgoing import MISSED_DUES_MAX, Missed, Outgoing
from services.trainer.ports import Stage, VersionRecord
from services.trainer.returns import GroupsReturned

__all__ = [
    "MISSED_DUES_MAX",
    "AcknowledgeBatch",
    "BatchAcknowledged",
    "BatchLeased",
    "CheckpointSaved",
    "Command",
    "Event",
    "Halt",
    "LeaseBatch",
    "Missed",
    "Phase",
    "PruneCheckpoints",
    "Publish",
    "Published",
    "RecordVersion",
    "Register",
    "Registered",
    "ReplicasDue",
    "SaveCheckpoint",
    "SealVersion",
    "ServerRestarted",
    "Started",
    "StepTrained",
    "StopRequested",
    "TrainStep",
    "TrainerEvent",
    "TrainerMachine",
    "VersionRecorded",
    "VersionSealed",
]

RECORDED_MAX = 64  # records that can be written again: more than a second brings about


class Phase(StrEnum):
    """What the trainer is doing; `PUBLISHING`: it waits for a publication to end."""

    STARTING = "starting"
    WAITING = "waiting"
    TRAINING = "training"
    SAVING = "saving"
    PUBLISHING = "publishing"
    STOPPED = "stopped"


class TrainerMachine:
    """See the module. To be read: `phase`, `step` (last trained one), `record` (its version),
    `durable` (step of the newest checkpoint), `checkpoint` (its folder), `outgoing`, `missed` (its
    replicas that miss the version)."""

    def __init__(
        self, *, checkpoint_every: int = 1, checkpoint_idle_s: float = 30.0, ahead_max: int = 0
    ) -> None:
        self.phase = Phase.STARTING
        self.step = self.durable = 0
        self.record, self.checkpoint = VersionRecord(0, NO_PARENT, "", ""), ""
        self.outgoing = Outgoing()
        self._every, self._idle_s, self._ahead_max = checkpoint_every, checkpoint_idle_s, ahead_max
        self._oldest_kept = self._told_oldest = self._pruned = 0
        self._now = self._asked_at = 0.0
        self._trained_s = self._training_since = 0.0  # whole steps; begin of the one in hand
        self._next_version = 1
        self._unrecorded: VersionRecord | None = None  # the newest, until it is recorded
        self._recorded: deque[RecordVersion] = deque(maxlen=RECORDED_MAX)
        self._leasing = False  # a lease was asked for and has not come
        self._arrived = 0  # step of a batch that is here and not dealt with
        self._handlers: dict[type[TrainerEvent], Callable[[Any], list[Command]]] = {
            Started: self._on_started,
            Registered: self._on_registered,
            BatchLeased: self._on_leased,
            StepTrained: self._on_trained,
            GroupsReturned: self._on_returned,
            VersionSealed: self._on_sealed,
            CheckpointSaved: self._on_saved,
            VersionRecorded: self._on_recorded,
            BatchAcknowledged: self._on_acknowledged,
            Published: self._on_published,
            ServerRestarted: self._on_server_restarted,
            ReplicasDue: self._on_replicas_due,
            StopRequested: self._on_stop,
        }

    @property
    def missed(self) -> dict[str, Missed]:
        return self.outgoing.missed

    def handle(self, event: TrainerEvent, now: float) -> list[Command]:
        """Commands that follow from `event`. `now`: seconds, steady."""
        self._now = now
        self.outgoing.to_write -= isinstance(event, VersionRecorded)
        commands = [] if self.phase is Phase.STOPPED else self._handlers[type(event)](event)
        records = [c for c in commands if isinstance(c, RecordVersion)]
        self.outgoing.to_write += len(records)
        self._recorded.extend(records)
        return commands

    def _on_started(self, event: Started) -> list[Command]:
        self._now_durable(event.step, event.record, event.oldest_kept)
        self._next_version = event.next_version
        # The record again: the process may have ended between checkpoint and record.
        return [RecordVersion(event.record), Register(event.step, event.oldest_kept)]

    def _now_durable(self, step: int, record: VersionRecord, oldest_kept: int) -> None:
        self.durable, self.checkpoint = step, record.checkpoint
        self._oldest_kept = oldest_kept
        self._made(step, record)

    def _made(self, step: int, record: VersionRecord) -> None:
        self.step, self.record, self._unrecorded = step, record, record
        self._next_version = max(self._next_version, record.version + 1)

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
        publish = self.outgoing.next(self._now)
        return [*publish, *([self._acknowledge()] if next_step <= self.step else self._go_on())]

    def _acknowledge(self) -> AcknowledgeBatch:
        self.phase = Phase.SAVING
        return AcknowledgeBatch(self.durable, self._oldest_kept)

    def _prune(self) -> list[Command]:
        """Only what the bank has answered for; after a publication, as it may wait and others
        need not."""
        if self._told_oldest <= self._pruned:
            return []
        self._pruned = self._told_oldest
        return [PruneCheckpoints(self._pruned)]

    def _on_leased(self, event: BatchLeased) -> list[Command]:
        self._leasing, self._arrived = False, event.step
        return self._go_on() if self.phase is Phase.WAITING else []

    def _on_acknowledged(self, _: BatchAcknowledged) -> list[Command]:
        self._told_oldest = self._oldest_kept
        prune = self._prune() if self.outgoing.sending is None else []
        return [*prune, *self._go_on()]

    def _on_published(self, event: Published) -> list[Command]:
        ended = self.outgoing.ended(event, self._now, self._busy_s())
        then = [*ended, *self._prune()]
        return [*then, *self._go_on()] if self.phase is Phase.PUBLISHING else then

    def _on_server_restarted(self, _: ServerRestarted) -> list[Command]:
        again, self._recorded = [*self._recorded], deque(maxlen=RECORDED_MAX)
        return [*again]

    def _on_replicas_due(self, _: ReplicasDue) -> list[Command]:
        if self.phase is Phase.STARTING:
            return []
        look = self.outgoing.look(self._now)
        idle = self.phase is Phase.WAITING and self._now - self._asked_at >= self._idle_s
        return [*look, *(self._save_sealed() if idle and self.step > self.durable else [])]

    def _save_sealed(self) -> list[Command]:
        """Nothing to train on: a good time to make durable what is not."""
        made = self.record
        assert made.report is not None, "a step that is not durable was trained here"
        self.phase = Phase.SAVING
        return [SaveCheckpoint(self.step, made.version, made.parent, made.report, made.digest)]

    def _on_stop(self, _: StopRequested) -> list[Command]:
        return self._halt()

    def _go_on(self) -> list[Command]:
        """Lease, or train what was leased; unless too many versions are still to be published."""
        step = self._arrived
        if 0 < step <= self.durable:
            self._arrived = 0
            return [self._acknowledge()]
        if self.outgoing.behind > self._ahead_max:
            self.phase = Phase.PUBLISHING
            return []
        if not step:
            self.phase = Phase.WAITING
            return [] if self._leasing else self._lease(self.step + 1)
        if step != self.step + 1:
            problem = f"the bank leased step {step} after step {self.step}"
            return self._halt(problem, "restart the trainer")
        self._arrived = 0
        self.phase, self._training_since = Phase.TRAINING, self._now
        return [TrainStep(step)]

    def _busy_s(self) -> float:
        """Seconds trained so far."""
        training = self.phase is Phase.TRAINING
        return self._trained_s + (self._now - self._training_since if training else 0.0)

    def _on_trained(self, event: StepTrained) -> list[Command]:
        report = event.report
        self._trained_s = self._busy_s()
        self.phase = Phase.SAVING
        due = report.step - self.durable >= self._every
        make = SaveCheckpoint if due else SealVersion
        return [make(report.step, self._next_version, self.record.version, report)]

    def _on_returned(self, event: GroupsReturned) -> list[Command]:
        self._trained_s = self._busy_s()
        self.phase = Phase.WAITING
        return self._lease(event.step)

    def _lease(self, step: int) -> list[Command]:
        self._leasing, self._asked_at = True, self._now
        return [LeaseBatch(step)]

    def _on_sealed(self, event: VersionSealed) -> list[Command]:
        self._made(event.step, event.record)
        return [RecordVersion(event.record)]

    def _on_saved(self, event: CheckpointSaved) -> list[Command]:
        self._now_durable(event.step, event.record, event.oldest_kept)
        return [RecordVersion(event.record)]

    def _on_recorded(self, event: VersionRecorded) -> list[Command]:
        """Of a version that is new here, or that has become durable; or written once more."""
        record = self._unrecorded
        if event.stage is Stage.PUBLISHED:
            return self.outgoing.recorded(event.version, self._now)
        new = record is not None and (record.version, record.stage) == (event.version, event.stage)
        if record is not None and new:
            self._unrecorded = None
            self.outgoing.made(record, self._now, self._busy_s())
        if self.phase is Phase.STARTING:
            return []  # Register follows
        publish = self.outgoing.next(self._now)
        if not new:
            return publish
        durable = event.stage is Stage.DURABLE
        return [*publish, *([self._acknowledge()] if durable else self._go_on())]

    def _halt(self, problem: str = "", way_out: str = "") -> list[Command]:
        self.phase = Phase.STOPPED
        return [Halt(problem, way_out)]
