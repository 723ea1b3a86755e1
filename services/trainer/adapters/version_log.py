"""The versions stream in Redis.

Owns: VersionRecord to protobuf. Promise: appended under the trainer's epoch, so a former trainer is
refused, and once per (version, stage), so a repeat after a crash changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis

from muster.clock import wall
from muster.streams import RunStreams, StreamEntry, reaching_redis, version_record
from muster.transfer.wire import report_to_pb
from muster.v1 import events_pb2 as ev
from services.trainer.figures import MismatchBucket, StepReport
from services.trainer.ports import KnownVersion, Stage, VersionRecord

_STAGES = {
    Stage.TRAINED: ev.VERSION_STAGE_TRAINED,
    Stage.DURABLE: ev.VERSION_STAGE_DURABLE,
    Stage.PUBLISHED: ev.VERSION_STAGE_PUBLISHED,
}


class RedisVersionLog:
    """See ports.VersionLog."""

    def __init__(self, client: Redis, run: str, epoch: int):
        self._redis = client
        self._streams = RunStreams(client, run, role="trainer", epoch=epoch)

    async def server(self) -> str:
        """See ports.VersionLog."""
        with reaching_redis():
            info: Mapping[str, Any] = await self._redis.info("server")
        return str(info["run_id"])

    async def known(self) -> dict[int, KnownVersion]:
        """See ports.VersionLog."""
        found = {}
        for message in await self._streams.read_all("versions"):
            record = version_record(message)
            if record and record.parent < record.version:
                found[record.version] = KnownVersion(record.parent, record.digest)
        return found

    async def append(self, record: VersionRecord) -> None:
        """See ports.VersionLog."""
        message = record_to_pb(record)
        message.at_unix_s = wall()
        dedupe = f"{message.version}/{message.stage}"
        entry = StreamEntry("versions", "versions", dedupe, message.SerializeToString())
        await self._streams.append([entry])


def record_to_pb(record: VersionRecord) -> ev.PolicyVersionRecord:
    """Everything but the time."""
    return ev.PolicyVersionRecord(
        version=record.version,
        parent=record.parent,
        digest=record.digest,
        stage=_STAGES[record.stage],
        checkpoint=record.checkpoint,
        step_kl=_step_kl(record.report),
        step=_report_to_pb(record.report) if record.report else None,
        publications=[report_to_pb(report) for report in record.publications],
        times=_times_to_pb(record) if record.stage is Stage.PUBLISHED else None,
    )


def _times_to_pb(record: VersionRecord) -> ev.PublicationTimes:
    times = record.times
    return ev.PublicationTimes(
        waited_s=times.waited_s,
        took_s=times.took_s,
        trained_meanwhile_s=times.trained_meanwhile_s,
    )


def _report_to_pb(report: StepReport) -> ev.StepReport:
    found = report.figures.mismatch
    return ev.StepReport(
        step=report.step,
        loss=report.figures.loss,
        grad_norm=report.figures.grad_norm,
        tokens=report.tokens,
        trajectories=report.trajectories,
        groups_with_variance=report.groups_with_variance,
        mismatch_k1=found.k1,
        mismatch_k3=found.k3,
        mismatch_max_abs=found.max_abs,
        ess_fraction=found.ess_fraction,
        truncated_share=found.truncated_share,
        train_s=report.train_s,
        lag_mean_versions=report.lag_mean_versions,
        ended_unix_s=report.ended_unix_s,
        clipped_share=report.figures.clipped_share,
        groups=report.groups,
        excluded=report.excluded,
        ess_turn=found.ess_turn,
        mismatch_mean_abs=found.mean_abs,
        mismatch=[_bucket_to_pb(bucket) for bucket in report.figures.buckets],
        groups_returned=report.groups_returned,
        predicted_kl=report.predicted_kl,
        measured_kl=report.measured_kl,
    )


def _step_kl(report: StepReport | None) -> float | None:
    """None when it was measured on nothing."""
    return report.figures.step_kl if report and report.figures.step_kl_tokens else None


def _bucket_to_pb(bucket: MismatchBucket) -> ev.MismatchBucket:
    found = bucket.found
    return ev.MismatchBucket(
        lag_versions=bucket.lag_versions,
        position_from=bucket.position_from,
        position_to=bucket.position_to,
        tokens=found.tokens,
        k1=found.k1,
        k3=found.k3,
        mean_abs=found.mean_abs,
        max_abs=found.max_abs,
        ratio_p01=found.ratio_p01,
        ratio_p999=found.ratio_p999,
        ess_token=found.ess_fraction,
        ess_turn=found.ess_turn,
        truncated_share=found.truncated_share,
    )
