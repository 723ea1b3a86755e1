"""A bank retires a group while a router starts: counted once, never opened again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from muster.streams import RunStreams, StreamEntry
from muster.v1 import events_pb2 as ev
from muster.v1 import router_pb2 as rt
from services.router import events as e
from services.router.adapters.durable import Durable
from tests.integration.router_world import BoxHost, router
from tests.integration.test_router import complete, events, until
from tests.integration.test_router_resume import submission, talking


class Overtaken(Durable):
    """The bank retires the only group, and trims all of it, at one moment of this router's start.

    A former router has read the fate.
    """

    moment = ""

    async def _tailed(self) -> Any:
        if self.moment == "before its fate is read":
            await self._retire()
        async for event in super()._tailed():
            yield event

    async def _totals(self, job: str) -> e.JobTotals:
        found = await super()._totals(job)
        if self.moment == "after the totals are read":
            await self._retire()
        return found

    async def _retire(self) -> None:
        streams = RunStreams(self._redis, self._streams.run)
        await retire_only_group(streams)
        for stream in ("events", "outcomes", "fates"):
            await streams.trim(stream, "9999999999999-0")


class BeforeItsFate(Overtaken):
    moment = "before its fate is read"


class AfterTheTotals(Overtaken):
    moment = "after the totals are read"


async def retire_only_group(streams: RunStreams) -> None:
    totals = {"trained": 1, "episodes": 2, "turns": 12}
    await streams.retire("job-00000", job="job", index=0, totals=totals, delete=[])


@pytest.mark.parametrize("kind", [BeforeItsFate, AfterTheTotals])
async def test_a_group_that_is_retired_while_a_router_starts_is_counted_once_and_not_opened_again(
    redis: Redis, run: str, tmp_path: Path, kind: type[Durable]
) -> None:
    streams = RunStreams(redis, run)
    fate = ev.GroupFate(group="job-00000", fate=ev.FATE_TRAINED, step=1).SerializeToString()
    async with talking(redis, run, [BoxHost("a")]):
        async with router(redis, run, tmp_path) as first:
            await first.stub.SubmitTaskSet(submission(), timeout=5)
            await until(first.stub, complete)
        await streams.append([StreamEntry("fates", "fates", "job-00000", fate)])
        async with router(redis, run, tmp_path, kind) as second:
            got = await second.stub.GetJob(rt.GetJobRequest(job="job"), timeout=5)
        assert await events(redis, run) == []
    assert got.progress.state == rt.JOB_STATE_DONE
    assert (got.progress.groups_trained, got.progress.episodes_finished) == (1, 2)


class Meddled:
    """A connection that finds a group retired right after it has read the totals."""

    def __init__(self, redis: Redis, streams: RunStreams):
        self._redis, self._streams = redis, streams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    async def hgetall(self, key: str) -> Any:
        found = await self._redis.hgetall(key)
        await retire_only_group(self._streams)
        return found


async def test_totals_and_retired_groups_are_of_one_moment(redis: Redis, run: str) -> None:
    streams = RunStreams(redis, run)
    opened = StreamEntry("events", "g:job-00000", "opened", b"")
    await streams.append([opened])
    meddled: Any = Meddled(redis, streams)
    found = await Durable(meddled, streams)._totals("job")
    assert (found.indexes_retired, found.trained, found.episodes) == ((0,), 1, 2)
