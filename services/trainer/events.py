"""What the trainer's schedule hears, and what it orders.

Owns: events and commands, as carriers. Promise: no I/O, nothing but plain values. Does not cover:
which follows from which (schedule.py, outgoing.py).
"""

from __future__ import annotations

from muster.types import Value
from services.trainer.figures import StepReport
from services.trainer.ports import ReplicaReport, Stage, VersionRecord
from services.trainer.returns import GroupsReturned


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


class VersionRecorded(Event, frozen=True):
    """A RecordVersion is written."""

    version: int
    stage: Stage


class BatchAcknowledged(Event, frozen=True):
    """The bank has recorded the fates of `step`."""

    step: int


class Published(Event, frozen=True):
    """A publication ended. `serving` counts replicas that serve its version."""

    reports: tuple[ReplicaReport, ...]
    serving: int


class ServerRestarted(Event, frozen=True):
    """The server of the streams is another process: it may have lost its newest records."""


class ReplicasDue(Event, frozen=True):
    """Time to look for replicas that joined late, or have missed the newest version."""


class StopRequested(Event, frozen=True):
    """The process is asked to end."""


TrainerEvent = (
    Started
    | Registered
    | BatchLeased
    | StepTrained
    | GroupsReturned
    | VersionSealed
    | CheckpointSaved
    | VersionRecorded
    | BatchAcknowledged
    | Published
    | ServerRestarted
    | ReplicasDue
    | StopRequested
)


class Command(Value, frozen=True, tag=True):
    """What is to be done; the commands of one answer are carried out in order. Nothing waits for a
    Publish but its Published: it goes on beside everything else."""


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
    """Bring a version, from its snapshot, to every replica that serves another, but those in
    `skip`. One at a time."""

    version: int
    parent: int
    skip: tuple[str, ...] = ()


class Halt(Command, frozen=True):
    """End the service; an empty `problem` is an orderly end."""

    problem: str = ""
    way_out: str = ""
