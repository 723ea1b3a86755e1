"""The trainer's status over gRPC. Reads the driver, decides nothing."""

from __future__ import annotations

from typing import Any

from muster.transfer.wire import report_to_pb
from muster.v1 import trainer_pb2 as pb
from muster.v1.trainer_pb2_grpc import TrainerServiceServicer
from services.trainer.adapters.version_log import record_to_pb
from services.trainer.driver import Driver
from services.trainer.schedule import Phase

SERVICE = "muster.v1.TrainerService"
_PHASES = {
    Phase.STARTING: pb.TRAINER_PHASE_STARTING,
    Phase.WAITING: pb.TRAINER_PHASE_WAITING,
    Phase.TRAINING: pb.TRAINER_PHASE_TRAINING,
    Phase.SAVING: pb.TRAINER_PHASE_SAVING,
    Phase.PUBLISHING: pb.TRAINER_PHASE_PUBLISHING,
    Phase.STOPPED: pb.TRAINER_PHASE_UNSPECIFIED,
}


class TrainerServicer(TrainerServiceServicer):
    """Serves GetTrainerStatus."""

    def __init__(self, driver: Driver):
        self._driver = driver

    async def GetTrainerStatus(
        self, request: pb.GetTrainerStatusRequest, context: Any
    ) -> pb.GetTrainerStatusResponse:
        """Phase, last trained step, its version, the newest checkpoint; `last.publications` are
        of the replicas that have not taken the version, with the error of the newest try."""
        machine = self._driver.machine
        outgoing = machine.outgoing
        last = record_to_pb(machine.record)
        last.publications.extend(report_to_pb(m.report) for m in machine.missed.values())
        return pb.GetTrainerStatusResponse(
            phase=_PHASES[machine.phase],
            trainer_epoch=self._driver.settings.epoch,
            step=machine.step,
            version=machine.record.version,
            checkpoint=machine.checkpoint,
            last=last,
            publishing_version=outgoing.sending,
            versions_behind=outgoing.behind,
        )
