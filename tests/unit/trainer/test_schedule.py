"""The trainer's order, and what a crash at each point of it comes to.

`World` keeps what survives a process (checkpoints, fates, records, replicas) and carries out the
commands; killing the trainer means a new machine over the same world.
"""

from __future__ import annotations

import pytest

from services.trainer import schedule as s
from services.trainer.figures import StepFigures, StepReport
from services.trainer.lineage import NO_PARENT
from services.trainer.ports import ReplicaReport, VersionRecord

BASE = VersionRecord(0, NO_PARENT, "digest-0", "base")


def report(step: int) -> StepReport:
    return StepReport(step, StepFigures(), 10, 4, 1, 2, 0, 0.0)


class Killed(Exception):
    """The process ended here."""


class World:
    """Durable state, and counters of effects."""

    def __init__(self, batches: int):
        self.checkpoints: list[tuple[int, VersionRecord]] = [(0, BASE)]
        self.batches = batches
        self.acknowledged: set[int] = set()
        self.in_checkpoint: list[int] = []
        self.records: dict[tuple[int, bool], VersionRecord] = {}
        self.serving = 0
        self.done = 0  # commands carried out, over all incarnations

    def live(self, kill_after: int) -> None:
        """Run one incarnation until no batch is left; raise Killed after so many commands."""
        machine = s.TrainerMachine()
        step, record = self.checkpoints[-1]
        events: list[s.TrainerEvent] = [s.Started(step, record, record.version + 1)]
        while events:
            for command in machine.handle(events.pop(0), 0.0):
                if self.done == kill_after:
                    self.done += 1
                    raise Killed
                self.done += 1
                event = self.carry_out(command)
                if event is not None:
                    events.append(event)

    def carry_out(self, command: s.Command) -> s.TrainerEvent | None:
        match command:
            case s.RecordVersion(record=record):
                self.records.setdefault((record.version, record.published), record)
            case s.Register(last_durable_step=step):
                self.acknowledged |= set(range(1, step + 1))
                return s.Registered(step + 1)
            case s.LeaseBatch(step=step):
                return s.BatchLeased(step) if step <= self.batches else None
            case s.TrainStep(step=step):
                return s.StepTrained(report(step))
            case s.SaveCheckpoint(step=step, version=version, parent=parent):
                record = VersionRecord(version, parent, f"digest-{version}", f"step-{step}")
                self.checkpoints.append((step, record))
                self.in_checkpoint.append(step)
                return s.CheckpointSaved(step, record)
            case s.AcknowledgeBatch(step=step):
                assert step in self.in_checkpoint, "acknowledged before it was durable"
                self.acknowledged.add(step)
                return s.BatchAcknowledged(step)
            case s.Publish(version=version):
                assert version == self.checkpoints[-1][1].version, "published before durable"
                reports = () if self.serving == version else (ReplicaReport("replica"),)
                self.serving = version
                return s.Published(reports, serving=1)
        return None


def test_one_step_in_order() -> None:
    world, seen = World(batches=1), []

    def note(command: s.Command) -> s.TrainerEvent | None:
        seen.append(type(command).__name__)
        return World.carry_out(world, command)

    world.carry_out = note  # type: ignore[method-assign]
    world.live(kill_after=-1)
    assert seen == [
        "RecordVersion",
        "Register",
        "Publish",
        "LeaseBatch",
        "TrainStep",
        "SaveCheckpoint",
        "RecordVersion",
        "AcknowledgeBatch",
        "Publish",
        "RecordVersion",
        "LeaseBatch",
    ]


@pytest.mark.parametrize("kill_after", range(25))
def test_a_crash_anywhere_loses_nothing_and_repeats_nothing(kill_after: int) -> None:
    world = World(batches=2)
    try:
        world.live(kill_after)
    except Killed:
        world.live(kill_after=-1)
    assert world.in_checkpoint == [1, 2]
    assert world.acknowledged == {1, 2}
    assert [record.version for _, record in world.checkpoints] == [0, 1, 2]
    assert world.serving == 2
    assert {(0, False), (1, False), (2, False), (2, True)} <= set(world.records)


def waiting(step: int = 0) -> s.TrainerMachine:
    """A machine that waits for a lease after `step`."""
    machine = s.TrainerMachine()
    record = VersionRecord(step, step - 1, "d", "c")
    machine.handle(s.Started(step, record, step + 1), 0.0)
    machine.handle(s.Registered(step + 1), 0.0)
    assert machine.handle(s.Published((), 1), 0.0)[-1] == s.LeaseBatch(step + 1)
    return machine


def test_a_batch_that_the_checkpoint_contains_is_only_acknowledged() -> None:
    machine = waiting(step=3)
    assert machine.handle(s.BatchLeased(3), 0.0) == [s.AcknowledgeBatch(3)]
    machine.handle(s.BatchAcknowledged(3), 0.0)
    assert machine.handle(s.Published((), 1), 0.0)[-1] == s.LeaseBatch(4)


def test_a_bank_that_still_asks_for_the_last_step_is_told_that_it_is_durable() -> None:
    machine = s.TrainerMachine()
    machine.handle(s.Started(3, VersionRecord(3, 2, "d", "c"), 4), 0.0)
    assert machine.handle(s.Registered(3), 0.0) == [s.AcknowledgeBatch(3)]


def test_a_bank_ahead_of_the_checkpoint_stops_the_trainer() -> None:
    machine = s.TrainerMachine()
    machine.handle(s.Started(1, VersionRecord(1, 0, "d", "c"), 2), 0.0)
    (halt,) = machine.handle(s.Registered(4), 0.0)
    assert isinstance(halt, s.Halt)
    assert "step 4" in halt.problem


def test_a_replica_that_missed_the_version_is_brought_up_while_waiting() -> None:
    machine = waiting(step=2)
    assert machine.handle(s.ReplicasDue(), 0.0) == [s.Publish(2, 1)]
    # The lease asked for before still stands: it is not asked for twice.
    assert machine.handle(s.Published((), 1), 0.0)[1:] == []
    assert machine.phase is s.Phase.WAITING


def test_a_batch_that_comes_during_a_publication_is_trained_after_it() -> None:
    machine = waiting(step=0)
    machine.handle(s.ReplicasDue(), 0.0)
    assert machine.handle(s.BatchLeased(1), 0.0) == []
    assert machine.handle(s.Published((), 0), 0.0) == [s.TrainStep(1)]


def test_replicas_are_left_alone_while_the_weights_move() -> None:
    machine = waiting(step=0)
    machine.handle(s.BatchLeased(1), 0.0)
    assert machine.handle(s.ReplicasDue(), 0.0) == []


def test_a_version_that_nobody_took_is_not_recorded_as_published() -> None:
    machine = waiting(step=2)
    machine.handle(s.ReplicasDue(), 0.0)
    failed = s.Published((ReplicaReport("r", error="gone"),), serving=0)
    assert machine.handle(failed, 0.0) == []


def test_a_new_version_lies_above_every_version_of_the_run() -> None:
    machine = s.TrainerMachine()
    machine.handle(s.Started(1, VersionRecord(1, 0, "d", "c"), next_version=7), 0.0)
    machine.handle(s.Registered(2), 0.0)
    machine.handle(s.Published((), 1), 0.0)
    machine.handle(s.BatchLeased(2), 0.0)
    (save,) = machine.handle(s.StepTrained(report(2)), 0.0)
    assert save == s.SaveCheckpoint(2, 7, 1, report(2))


def test_after_a_stop_nothing_follows() -> None:
    machine = waiting()
    assert machine.handle(s.StopRequested(), 0.0) == [s.Halt()]
    assert machine.handle(s.BatchLeased(1), 0.0) == []


def failing(machine: s.TrainerMachine, *replicas: str) -> list[s.Command]:
    reports = tuple(ReplicaReport(name, error="not a child of -1") for name in replicas)
    return machine.handle(s.Published(reports, serving=0), 0.0)


def waiting_at_base() -> s.TrainerMachine:
    machine = s.TrainerMachine()
    machine.handle(s.Started(0, BASE, 5), 0.0)
    assert machine.handle(s.Registered(1), 0.0) == [s.Publish(0, NO_PARENT)]
    return machine


def test_a_replica_that_keeps_failing_is_tried_ever_more_seldom() -> None:
    machine = waiting_at_base()
    failing(machine, "a")
    tried_at = []
    for due in range(1, 61):
        (publish,) = machine.handle(s.ReplicasDue(), 0.0)
        assert isinstance(publish, s.Publish)
        tried = "a" not in publish.skip
        if tried:
            tried_at.append(due)
        failing(machine, *(["a"] if tried else []))
    assert tried_at == [1, 3, 7, 15, 27, 39, 51]
    assert machine.missed["a"].tries == 8


def test_a_new_version_is_tried_at_once_and_success_is_forgotten() -> None:
    machine = waiting_at_base()
    failing(machine, "a", "b")
    machine.handle(s.ReplicasDue(), 0.0)
    failing(machine, "b")  # a took it
    assert set(machine.missed) == {"b"}
    machine.handle(s.CheckpointSaved(1, VersionRecord(5, 0, "d", "c")), 0.0)
    assert machine.handle(s.BatchAcknowledged(1), 0.0) == [s.Publish(5, 0)]
