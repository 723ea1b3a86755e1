"""What evaluations came to, for whoever asks: groups from the streams, and how replicas serve.

Owns: those reads. Promise: a group is there once its fate is durable; a replica that does not
answer in time is left out, and never holds the answer up. Does not cover: who writes the groups
(the bank), figures over them (muster/evaluation.py).
"""

from __future__ import annotations

import asyncio

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from muster import codec, rpc, served, telemetry
from muster.errors import MusterError
from muster.fingerprint import fingerprint_to_pb
from muster.streams import RunStreams
from muster.v1 import events_pb2 as ev
from muster.v1 import inference_pb2 as inf
from muster.v1 import router_pb2 as pb
from services.router import events as e
from services.router.adapters.replicas import ReplicaCalls
from services.router.jobs import Job, JobState

_STATUS_S = 2.0
_log = telemetry.logger("router.evaluations")
STATES = {
    JobState.RUNNING: pb.JOB_STATE_RUNNING,
    JobState.DONE: pb.JOB_STATE_DONE,
    JobState.CANCELLED: pb.JOB_STATE_CANCELLED,
}


class Evaluations:
    """Of one run."""

    def __init__(self, redis: Redis, streams: RunStreams):
        self._redis, self._streams = redis, streams

    async def groups(self, job: str) -> list[ev.EvaluatedGroup]:
        """Those of the job that have ended, in that order; unreadable entries are left out."""
        groups = []
        for message in await self._streams.read_all("evaluations"):
            try:
                found = ev.EvaluatedGroup.FromString(message.data)
            except DecodeError as error:
                _log.error("entry %s of stream evaluations cannot be read: %s", message.id, error)
                continue
            if found.job == job:
                groups.append(found)
        return groups

    async def header(
        self, job: Job, training: e.JobSpec | None, serving: list[pb.ReplicaServing]
    ) -> pb.EvaluationHeader:
        """What was asked for, and what to compare with."""
        spec, run = job.spec, self._streams.run
        found = pb.EvaluationHeader(
            run=run,
            job=spec.id,
            sampling=codec.sampling_to_pb(spec.sampling),
            groups=spec.groups,
            group_size=spec.group_size,
            submitted_unix_s=spec.submitted_unix_s,
            state=STATES[job.state],
            serving=serving,
            run_served_by=map(fingerprint_to_pb, await served.recorded(self._redis, run)),
        )
        if training is not None:
            found.training_job = training.id
            found.training_sampling.CopyFrom(codec.sampling_to_pb(training.sampling))
        return found

    async def serving(
        self, replicas: ReplicaCalls, fleet: tuple[str, ...]
    ) -> list[pb.ReplicaServing]:
        """How those replicas serve, as they say now."""
        async with asyncio.TaskGroup() as tasks:
            asked = {
                replica: tasks.create_task(_status(replicas, replica), name=f"status-{replica}")
                for replica in sorted(fleet)
            }
        statuses = {replica: task.result() for replica, task in asked.items()}
        return [
            pb.ReplicaServing(
                replica=replica,
                serving=status.serving if status.HasField("serving") else None,
                fingerprint=status.fingerprint,
            )
            for replica, status in statuses.items()
            if status is not None
        ]


async def _status(replicas: ReplicaCalls, replica: str) -> inf.GetReplicaStatusResponse | None:
    try:
        with rpc.calling(f"GetReplicaStatus on {replica}"):
            return await replicas.status(replica, timeout_s=_STATUS_S)
    except MusterError as error:
        _log.info("%s does not say how it serves: %s", replica, error)
        return None
