"""What the status call says."""

from __future__ import annotations

from pathlib import Path

from muster.v1 import trainer_pb2 as pb
from services.trainer import schedule as s
from services.trainer.ports import ReplicaReport, Stage, VersionRecord
from services.trainer.server import TrainerServicer
from tests.unit.trainer.test_driver import Stage as Outer


async def test_the_status_names_replicas_that_miss_the_version_and_why(tmp_path: Path) -> None:
    driver = Outer(tmp_path).driver()
    for event in (
        s.Started(0, VersionRecord(0, -1, "digest", "base"), 1),
        s.VersionRecorded(0, Stage.DURABLE),
        s.Registered(1),
        s.Published((ReplicaReport("a"), ReplicaReport("b", error="it is full")), serving=1),
    ):
        driver.machine.handle(event, 0.0)
    status = await TrainerServicer(driver).GetTrainerStatus(pb.GetTrainerStatusRequest(), None)
    assert status.phase == pb.TRAINER_PHASE_WAITING
    assert not status.HasField("publishing_version")
    assert status.versions_behind == 0
    assert [(p.replica, p.error) for p in status.last.publications] == [("b", "it is full")]
