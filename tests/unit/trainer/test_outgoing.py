"""What is published when, and whom it is sent to again."""

from __future__ import annotations

import pytest

from services.trainer import schedule as s
from services.trainer.ports import PublicationTimes, ReplicaReport, Stage, VersionRecord
from tests.unit.trainer.machines import begun, seal, waiting


def failing(machine: s.TrainerMachine, *replicas: str) -> list[s.Command]:
    reports = tuple(ReplicaReport(name, error="not a child of -1") for name in replicas)
    return machine.handle(s.Published(reports, serving=0), 0.0)


def test_a_replica_that_keeps_failing_is_tried_ever_more_seldom() -> None:
    machine = begun()
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
    machine = begun()
    failing(machine, "a", "b")
    machine.handle(s.ReplicasDue(), 0.0)
    failing(machine, "b")  # a took it
    assert set(machine.missed) == {"b"}
    machine.handle(s.CheckpointSaved(1, VersionRecord(5, 0, "d", "c")), 0.0)
    assert machine.handle(s.VersionRecorded(5, Stage.DURABLE), 0.0)[0] == s.Publish(5, 0)


def test_one_that_was_left_out_is_not_forgotten_when_time_passes_meanwhile() -> None:
    machine = begun()
    failing(machine, "a")
    machine.handle(s.ReplicasDue(), 0.0)
    failing(machine, "a")  # again at the third
    machine.handle(s.ReplicasDue(), 0.0)
    machine.handle(s.ReplicasDue(), 5.0)  # while the others are looked at
    machine.handle(s.Published((), 1), 6.0)
    assert machine.missed["a"].tries == 2


def test_one_that_was_to_be_left_out_and_took_it_all_the_same_misses_nothing() -> None:
    machine = begun()
    failing(machine, "a")
    machine.handle(s.ReplicasDue(), 0.0)
    failing(machine, "a")  # again at the third
    assert machine.handle(s.ReplicasDue(), 0.0) == [s.Publish(0, -1, ("a",))]
    machine.handle(s.Published((ReplicaReport("a"),), 1), 0.0)
    assert machine.missed == {}


def overlapping(ahead_max: int = 1) -> s.TrainerMachine:
    """Step 1 is sealed and on its way, and step 2 is being trained."""
    machine = waiting(ahead_max=ahead_max, checkpoint_every=9)
    assert machine.handle(s.BatchLeased(1), 0.0) == [s.TrainStep(1)]
    assert seal(machine, 1) == [s.Publish(1, 0), s.LeaseBatch(2)]
    assert machine.handle(s.BatchLeased(2), 0.0) == [s.TrainStep(2)]
    return machine


def test_the_next_step_is_trained_while_a_version_is_on_its_way() -> None:
    machine = overlapping()
    assert machine.phase is s.Phase.TRAINING
    assert machine.outgoing.sending == 1


def test_a_trainer_that_is_quicker_than_the_line_waits_for_it() -> None:
    machine = overlapping()
    assert seal(machine, 2) == []  # it waits behind the first
    assert machine.phase is s.Phase.PUBLISHING
    recorded, lease = machine.handle(s.Published((ReplicaReport("a"),), 1), 0.0)
    assert isinstance(recorded, s.RecordVersion)
    assert lease == s.LeaseBatch(3)


def test_the_next_version_is_begun_when_the_record_of_the_one_before_is_written() -> None:
    machine = overlapping()
    seal(machine, 2)
    machine.handle(s.Published((ReplicaReport("a"),), 1), 0.0)
    assert machine.handle(s.ReplicasDue(), 0.0) == []
    assert machine.handle(s.VersionRecorded(1, Stage.PUBLISHED), 0.0) == [s.Publish(2, 1)]


def test_nothing_is_sent_until_a_restarted_store_has_all_records_again() -> None:
    machine = waiting(step=3)
    again = machine.handle(s.ServerRestarted(), 0.0)
    stages = [c.record.stage for c in again if isinstance(c, s.RecordVersion)]
    assert stages == [Stage.DURABLE, Stage.PUBLISHED]
    assert machine.handle(s.ReplicasDue(), 0.0) == []
    machine.handle(s.VersionRecorded(3, Stage.DURABLE), 0.0)
    assert machine.handle(s.ReplicasDue(), 0.0) == []
    machine.handle(s.VersionRecorded(3, Stage.PUBLISHED), 0.0)
    assert machine.handle(s.ReplicasDue(), 0.0) == [s.Publish(3, 2)]


def test_a_version_that_waited_for_records_to_be_written_again_is_sent_after_the_last() -> None:
    machine = waiting(step=3, checkpoint_every=9)
    machine.handle(s.BatchLeased(4), 0.0)
    machine.handle(s.ServerRestarted(), 0.0)
    assert seal(machine, 4) == []
    assert machine.handle(s.VersionRecorded(3, Stage.DURABLE), 0.0) == []
    assert machine.handle(s.VersionRecorded(3, Stage.PUBLISHED), 0.0) == [s.Publish(4, 3)]


def test_versions_made_while_one_is_sent_are_superseded_by_the_newest() -> None:
    """The one under way is never cut, and no version between is sent."""
    machine = overlapping(ahead_max=3)
    assert seal(machine, 2) == [s.LeaseBatch(3)]
    machine.handle(s.BatchLeased(3), 0.0)
    assert seal(machine, 3) == [s.LeaseBatch(4)]
    machine.handle(s.Published((ReplicaReport("a"),), 1), 0.0)
    assert machine.handle(s.VersionRecorded(1, Stage.PUBLISHED), 0.0) == [s.Publish(3, 2)]
    machine.handle(s.Published((ReplicaReport("a"),), 1), 0.0)
    assert machine.outgoing.behind == 0


def test_a_version_that_nobody_could_take_does_not_hold_the_trainer_up() -> None:
    machine = overlapping()
    seal(machine, 2)
    assert failing(machine, "a", "b") == [s.Publish(2, 1), s.LeaseBatch(3)]
    assert machine.missed == {}  # of a version that is no longer the newest


def test_without_a_batch_a_version_is_published_and_replicas_are_looked_at_all_the_same() -> None:
    machine = waiting(ahead_max=1, checkpoint_every=9)
    machine.handle(s.BatchLeased(1), 0.0)
    assert seal(machine, 1) == [s.Publish(1, 0), s.LeaseBatch(2)]
    machine.handle(s.Published((ReplicaReport("a"),), 1), 0.0)
    machine.handle(s.VersionRecorded(1, Stage.PUBLISHED), 0.0)
    assert machine.handle(s.ReplicasDue(), 5.0) == [s.Publish(1, 0)]


@pytest.mark.parametrize("ahead_max", [0, 1])
def test_the_first_step_waits_for_the_first_publication_only_in_step(ahead_max: int) -> None:
    machine = begun(ahead_max=ahead_max)
    leased = machine.phase is s.Phase.WAITING
    assert leased == (ahead_max == 1)


def test_a_published_record_says_how_long_it_took_and_what_was_trained_meanwhile() -> None:
    machine = waiting(ahead_max=2, checkpoint_every=9)
    machine.handle(s.BatchLeased(1), 0.0)
    seal(machine, 1, at=10.0)
    machine.handle(s.BatchLeased(2), 12.0)
    seal(machine, 2, at=16.0)  # while the first is under way
    machine.handle(s.BatchLeased(3), 17.0)
    (first,) = machine.handle(s.Published((ReplicaReport("a"),), 1), 18.0)
    assert isinstance(first, s.RecordVersion)
    assert first.record.times == PublicationTimes(0.0, 8.0, 5.0)
    machine.handle(s.VersionRecorded(1, Stage.PUBLISHED), 18.0)
    (second,) = machine.handle(s.Published((ReplicaReport("a"),), 1), 21.0)
    assert isinstance(second, s.RecordVersion)
    assert second.record.times == PublicationTimes(2.0, 3.0, 4.0)
