"""Trainer machines brought to where a story begins."""

from __future__ import annotations

from services.trainer import schedule as s
from services.trainer.figures import StepFigures, StepReport
from services.trainer.lineage import NO_PARENT
from services.trainer.ports import Stage, VersionRecord

BASE = VersionRecord(0, NO_PARENT, "digest-0", "base")


def report(step: int) -> StepReport:
    return StepReport(step, StepFigures(), 10, 4, 1, 2, 0, 0.0)


def begun(
    record: VersionRecord = BASE,
    *,
    step: int = 0,
    next_version: int = 0,
    oldest: int = 0,
    **of: int,
) -> s.TrainerMachine:
    """A machine whose trainer is registered, while the first publication is under way."""
    machine = s.TrainerMachine(checkpoint_idle_s=10.0, **of)
    next_version = next_version or record.version + 1
    machine.handle(s.Started(step, record, next_version, oldest), 0.0)
    machine.handle(s.VersionRecorded(record.version, record.stage), 0.0)
    first = machine.handle(s.Registered(step + 1), 0.0)
    assert first[0] == s.Publish(record.version, record.parent)
    return machine


def waiting(step: int = 0, **of: int) -> s.TrainerMachine:
    """A machine that waits for a lease after `step`."""
    machine = begun(VersionRecord(step, step - 1, "d", "c"), step=step, **of)
    followed = machine.handle(s.Published((), 1), 0.0)
    assert machine.phase is s.Phase.WAITING
    if any(isinstance(command, s.RecordVersion) for command in followed):
        machine.handle(s.VersionRecorded(step, Stage.PUBLISHED), 0.0)
    return machine


def seal(machine: s.TrainerMachine, step: int, at: float = 0.0) -> list[s.Command]:
    """Train a leased step and seal it; what follows its record."""
    machine.handle(s.StepTrained(report(step)), at)
    record = VersionRecord(step, step - 1, f"d{step}", "", Stage.TRAINED, report(step))
    assert machine.handle(s.VersionSealed(step, record), at) == [s.RecordVersion(record)]
    return machine.handle(s.VersionRecorded(step, Stage.TRAINED), at)
