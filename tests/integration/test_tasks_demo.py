"""A further demo says which job of an interrupted one comes first."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from muster.cli.demo import unfinished
from muster.client import MusterClient
from muster.streams import RunStreams, StreamEntry
from muster.v1 import events_pb2 as ev
from muster.v1 import router_pb2 as pb
from tests.unit.client.router_double import RouterDouble, progress


class Router(RouterDouble):
    """Job `a` is done, `b` goes on, `c` was cancelled."""

    async def GetJob(self, request: Any, context: Any) -> pb.GetJobResponse:
        states = {"a": pb.JOB_STATE_DONE, "b": pb.JOB_STATE_RUNNING}
        found = progress(1, states.get(request.job, pb.JOB_STATE_CANCELLED))
        found.job = request.job
        return pb.GetJobResponse(progress=found)


async def test_the_job_that_an_interrupted_demo_left_is_named(redis: Redis, run: str) -> None:
    records = [("a", False), ("b", False), ("c", False), ("c", True)]
    entries = [
        StreamEntry(
            "jobs",
            "jobs",
            f"{job}/{cancelled}",
            ev.JobRecord(job=job, cancelled=cancelled).SerializeToString(),
        )
        for job, cancelled in records
    ]
    await RunStreams(redis, run).append(entries)
    async with Router().serving() as server, MusterClient(server.address) as client:
        lines = await unfinished(redis, run, client)
    assert lines == ["first b of an earlier demo is finished: 1 of 2 groups trained so far"]
