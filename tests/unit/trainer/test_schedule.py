"""The trainer's order, and what a crash at each point of it comes to.

`World` keeps what survives a process (checkpoints, fates, records, replicas) and carries out the
commands; killing the trainer means a new machine over the same world.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.trainer import schedule as s
from services.trainer.ports import ReplicaReport, Stage, VersionRecord
from tests.unit.trainer.machines import BASE, begun, report, seal, waiting


class Killed(Exception):
    """The process ended here."""


class World:
    """Durable state, and counters of effects."""

    def __init__(self, batches: int, *, every: int = 1, keep: int = 0):
        self.checkpoints: list[tuple[int, VersionRecord]] = [(0, BASE)]
        self.every, self.keep = every, keep
        self.told_oldest = 0
        self.trained = 0  # steps, over all incarnations: names of weights
        self.steps: dict[str, int] = {}  # by digest
        self.batches = batches
        self.acknowledged: set[int] = set()
        self.in_checkpoint: list[int] = []
        self.records: dict[tuple[int, Stage], VersionRecord] = {}
        self.serving = 0
        self.done = 0  # commands carried out, over all incarnations

    def live(self, kill_after: int) -> None:
        """Run one incarnation until no batch is left; raise Killed after so many commands."""
        machine = s.TrainerMachine(checkpoint_every=self.every, checkpoint_idle_s=10.0)
        step, record = self.checkpoints[-1]
        newest = max([record.version, *(version for version, _ in self.records)])
        events: list[s.TrainerEvent] = [s.Started(step, record, newest + 1, self.oldest())]
        while events:
            for command in machine.handle(events.pop(0), 0.0):
                if self.done == kill_after:
                    self.done += 1
                    raise Killed
                self.done += 1
                event = self.carry_out(command)
                if event is not None:
                    events.append(event)

    def oldest(self) -> int:
        return self.checkpoints[-self.keep][0] if 0 < self.keep < len(self.checkpoints) else 0

    def carry_out(self, command: s.Command) -> s.TrainerEvent | None:
        match command:
            case s.SealVersion() | s.SaveCheckpoint():
                return self.make(command)
            case s.PruneCheckpoints(oldest_kept=oldest):
                assert oldest <= self.told_oldest, "deleted what the bank may still be asked for"
                self.checkpoints = [c for c in self.checkpoints if c[0] >= oldest]
            case s.RecordVersion(record=record):
                self.records.setdefault((record.version, record.stage), record)
                return s.VersionRecorded(record.version, record.stage)
            case s.Register(last_durable_step=step):
                self.tell(step, command.oldest_kept)
                return s.Registered(step + 1)
            case s.LeaseBatch(step=step):
                return s.BatchLeased(step) if step <= self.batches else None
            case s.TrainStep(step=step):
                return s.StepTrained(report(step))
            case s.AcknowledgeBatch(step=step):
                assert step in self.in_checkpoint, "acknowledged before it was durable"
                self.tell(step, command.oldest_kept)
                return s.BatchAcknowledged(step)
            case s.Publish(version=version):
                assert any(version == known for known, _ in self.records), "a stranger's tokens"
                reports = () if self.serving == version else (ReplicaReport("replica"),)
                self.serving = version
                return s.Published(reports, serving=1)
        return None

    def line(self) -> list[int]:
        """Steps that made the newest checkpoint, the last one first."""
        known = {record.version: record for record in self.records.values()}
        found, at = [], self.checkpoints[-1][1]
        while at.version:
            found.append(self.steps[at.digest])
            assert at.parent < at.version, "a version is older than its parent"
            at = known[at.parent]
        return found

    def tell(self, step: int, oldest: int) -> None:
        self.told_oldest = max(self.told_oldest, oldest)
        self.acknowledged |= set(range(1, step + 1))

    def make(self, command: s.SealVersion | s.SaveCheckpoint) -> s.TrainerEvent:
        self.trained += 1
        digest, step = f"digest-{self.trained}", command.step
        self.steps[digest] = step
        record = VersionRecord(command.version, command.parent, digest, f"step-{step}")
        if isinstance(command, s.SealVersion):
            record = replace(record, checkpoint="", stage=Stage.TRAINED, report=command.report)
            return s.VersionSealed(step, record)
        self.checkpoints.append((step, record))
        self.in_checkpoint.append(step)
        return s.CheckpointSaved(step, record, self.oldest())


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
        "Publish",
        "AcknowledgeBatch",
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
    durable = {(version, Stage.DURABLE) for version in range(3)}
    assert durable | {(2, Stage.PUBLISHED)} <= set(world.records)


@pytest.mark.parametrize("kill_after", range(60))
def test_a_crash_between_checkpoints_trains_the_batches_since_then_again(kill_after: int) -> None:
    """Checkpoints at 2 and 4, the newest of them kept; each step once in the last lineage."""
    world = World(batches=4, every=2, keep=1)
    try:
        world.live(kill_after)
    except Killed:
        world.live(kill_after=-1)
    assert world.acknowledged == {1, 2, 3, 4}
    assert {step for step, _ in world.checkpoints} == {4}
    assert world.line() == [4, 3, 2, 1]


@pytest.mark.parametrize("kill_after", range(60))
def test_a_number_never_stands_for_two_sets_of_weights(kill_after: int) -> None:
    world = World(batches=4, every=2)
    for kills in (kill_after, -1):
        try:
            world.live(kills)
        except Killed:
            continue
    records = [*world.records.values(), *(record for _, record in world.checkpoints)]
    weights = {record.version: record.digest for record in records}
    assert all(weights[record.version] == record.digest for record in records)


def test_steps_between_checkpoints_are_published_and_not_acknowledged() -> None:
    world = World(batches=3, every=2)
    world.live(kill_after=-1)
    assert world.serving == 3
    assert world.acknowledged == {1, 2}
    assert (3, Stage.TRAINED) in world.records
    assert (3, Stage.DURABLE) not in world.records


def sealed() -> s.TrainerMachine:
    """A machine that waits, at 100 s, after a step that is in no checkpoint."""
    machine = begun(checkpoint_every=4)
    machine.handle(s.Published((), 1), 0.0)
    machine.handle(s.BatchLeased(1), 0.0)
    assert seal(machine, 1) == [s.Publish(1, 0)]
    machine.handle(s.Published((), 1), 100.0)
    machine.handle(s.VersionRecorded(1, Stage.PUBLISHED), 100.0)
    return machine


def test_without_a_next_batch_the_last_step_is_saved_as_the_version_it_is() -> None:
    machine = sealed()
    assert machine.handle(s.ReplicasDue(), 109.0) == [s.Publish(1, 0)]
    machine.handle(s.Published((), 1), 109.5)
    machine.handle(s.VersionRecorded(1, Stage.PUBLISHED), 109.5)
    look, save = machine.handle(s.ReplicasDue(), 110.0)
    assert look == s.Publish(1, 0)
    assert save == s.SaveCheckpoint(1, 1, 0, report(1), "d1")
    saved = VersionRecord(1, 0, "d1", "folder", report=report(1))
    assert machine.handle(s.CheckpointSaved(1, saved), 110.0) == [s.RecordVersion(saved)]
    then = machine.handle(s.VersionRecorded(1, Stage.DURABLE), 110.0)
    assert then == [s.AcknowledgeBatch(1)]  # it is published already
    assert machine.handle(s.BatchAcknowledged(1), 110.0) == []  # the lease still stands
    assert machine.phase is s.Phase.WAITING


def test_a_batch_that_comes_while_the_last_step_is_saved_is_trained_after_it() -> None:
    machine = sealed()
    machine.handle(s.ReplicasDue(), 110.0)
    assert machine.handle(s.BatchLeased(2), 110.0) == []
    saved = VersionRecord(1, 0, "d1", "folder", report=report(1))
    machine.handle(s.CheckpointSaved(1, saved), 111.0)
    machine.handle(s.VersionRecorded(1, Stage.DURABLE), 111.0)
    assert machine.handle(s.BatchAcknowledged(1), 111.0) == [s.TrainStep(2)]


def test_an_old_checkpoint_goes_only_after_the_bank_has_answered() -> None:
    machine = waiting(step=3)
    machine.handle(s.BatchLeased(4), 0.0)
    machine.handle(s.StepTrained(report(4)), 0.0)
    record = VersionRecord(4, 3, "d", "c")
    machine.handle(s.CheckpointSaved(4, record, oldest_kept=2), 0.0)
    then = machine.handle(s.VersionRecorded(4, Stage.DURABLE), 0.0)
    assert then == [s.Publish(4, 3), s.AcknowledgeBatch(4, 2)]
    published = machine.handle(s.Published((), 1), 0.0)
    assert [type(c) for c in published] == [s.RecordVersion]  # no answer yet
    then = machine.handle(s.BatchAcknowledged(4), 0.0)
    assert then == [s.PruneCheckpoints(2), s.LeaseBatch(5)]


def test_while_a_version_is_sent_no_lease_waits_for_a_deletion() -> None:
    machine = waiting(step=3, ahead_max=1)
    machine.handle(s.BatchLeased(4), 0.0)
    machine.handle(s.StepTrained(report(4)), 0.0)
    machine.handle(s.CheckpointSaved(4, VersionRecord(4, 3, "d", "c"), oldest_kept=2), 0.0)
    machine.handle(s.VersionRecorded(4, Stage.DURABLE), 0.0)
    assert machine.handle(s.BatchAcknowledged(4), 0.0) == [s.LeaseBatch(5)]
    assert machine.handle(s.Published((), 1), 0.0)[-1] == s.PruneCheckpoints(2)


def test_a_deletion_that_a_crash_left_out_follows_the_registration() -> None:
    machine = begun(VersionRecord(4, 3, "d", "c"), step=4, oldest=2)
    assert s.PruneCheckpoints(2) in machine.handle(s.Published((), 1), 0.0)


def test_a_batch_that_the_checkpoint_contains_is_only_acknowledged() -> None:
    machine = waiting(step=3)
    assert machine.handle(s.BatchLeased(3), 0.0) == [s.AcknowledgeBatch(3)]
    assert machine.handle(s.BatchAcknowledged(3), 0.0)[-1] == s.LeaseBatch(4)


def test_a_bank_that_still_asks_for_the_last_step_is_told_that_it_is_durable() -> None:
    machine = s.TrainerMachine()
    machine.handle(s.Started(3, VersionRecord(3, 2, "d", "c"), 4), 0.0)
    machine.handle(s.VersionRecorded(3, Stage.DURABLE), 0.0)
    assert machine.handle(s.Registered(3), 0.0) == [s.Publish(3, 2), s.AcknowledgeBatch(3)]


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


def test_a_replica_that_joins_while_a_step_is_trained_is_brought_up_then() -> None:
    machine = waiting(step=2)
    machine.handle(s.BatchLeased(3), 0.0)
    assert machine.handle(s.ReplicasDue(), 0.0) == [s.Publish(2, 1)]
    assert machine.handle(s.ReplicasDue(), 5.0) == []  # one at a time
    assert machine.phase is s.Phase.TRAINING


def test_a_batch_that_comes_during_a_resend_is_trained_at_once() -> None:
    machine = waiting(step=0)
    machine.handle(s.ReplicasDue(), 0.0)
    assert machine.handle(s.BatchLeased(1), 0.0) == [s.TrainStep(1)]


def test_a_version_made_during_a_resend_is_sent_after_it() -> None:
    machine = waiting(step=0, checkpoint_every=4)
    machine.handle(s.BatchLeased(1), 0.0)
    machine.handle(s.ReplicasDue(), 0.0)
    assert seal(machine, 1) == []
    assert machine.phase is s.Phase.PUBLISHING
    failed = s.Published((ReplicaReport("late", error="gone"),), serving=1)
    assert machine.handle(failed, 0.0) == [s.Publish(1, 0)]  # and the late one is not skipped
    assert machine.handle(s.Published((), 2), 0.0)[-1] == s.LeaseBatch(2)


def test_nothing_is_sent_before_the_trainer_is_registered() -> None:
    machine = s.TrainerMachine()
    machine.handle(s.Started(0, BASE, 1), 0.0)
    assert machine.handle(s.ReplicasDue(), 0.0) == []


def test_a_version_that_nobody_took_is_not_recorded_as_published() -> None:
    machine = waiting(step=2)
    machine.handle(s.ReplicasDue(), 0.0)
    failed = s.Published((ReplicaReport("r", error="gone"),), serving=0)
    assert machine.handle(failed, 0.0) == []


def test_a_new_version_lies_above_every_version_of_the_run() -> None:
    machine = begun(VersionRecord(1, 0, "d", "c"), step=1, next_version=7)
    machine.handle(s.Published((), 1), 0.0)
    machine.handle(s.BatchLeased(2), 0.0)
    (save,) = machine.handle(s.StepTrained(report(2)), 0.0)
    assert save == s.SaveCheckpoint(2, 7, 1, report(2))


def test_after_a_stop_nothing_follows() -> None:
    machine = waiting()
    assert machine.handle(s.StopRequested(), 0.0) == [s.Halt()]
    assert machine.handle(s.BatchLeased(1), 0.0) == []


def test_a_server_that_was_restarted_gets_every_record_again_however_often() -> None:
    world = World(batches=2)
    machine = s.TrainerMachine()
    events: list[s.TrainerEvent] = [s.Started(0, BASE, 1)]
    while events:
        for command in machine.handle(events.pop(0), 0.0):
            if (event := world.carry_out(command)) is not None:
                events.append(event)
    for _ in range(2):
        again = machine.handle(s.ServerRestarted(), 0.0)
        assert again == [s.RecordVersion(record) for record in world.records.values()]
