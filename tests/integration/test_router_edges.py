"""The router's shell at its edges: one test per line that nothing else pins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from muster import rpc
from muster.errors import Exhausted, Fenced, InvalidInput, Refused
from muster.streams import Received
from muster.types import EpisodeKey, SamplingParams
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from muster.v1 import router_pb2 as rt
from services.router.adapters.durable import Durable, decode_tailed
from services.router.commands import OpenGroup
from services.router.config import RouterConfig
from tests.integration.router_world import fleet, router
from tests.integration.test_router import submission


@pytest.mark.parametrize(
    "message",
    [
        Received(
            "versions",
            "1-0",
            ev.PolicyVersionRecord(version=3, stage=ev.VERSION_STAGE_DURABLE).SerializeToString(),
            "",
        ),
        Received("batches", "1-0", ev.BatchRecord(step=3).SerializeToString(), ""),
    ],
)
def test_what_is_neither_published_nor_trained_means_nothing_yet(message: Received) -> None:
    assert decode_tailed(message.stream, message.data) is None


def test_a_version_without_a_stage_is_none() -> None:
    with pytest.raises(InvalidInput):
        decode_tailed("versions", ev.PolicyVersionRecord(version=3).SerializeToString())


class NoConversations:
    """For runs without an episode that goes on."""

    def text(self, ids: Any) -> str:
        raise AssertionError("nothing is read")

    async def prompt(self, opening: Any) -> Any:
        raise AssertionError("nothing goes on")

    def restore(self, *told: Any) -> None:
        raise AssertionError("nothing goes on")


async def test_following_goes_on_after_what_recovery_read_and_reads_nothing_twice(
    redis: Redis, run: str
) -> None:
    from muster.streams import RunStreams
    from tests.versions import append_version

    durable = Durable(redis, RunStreams(redis, run))
    stage = ev.VERSION_STAGE_PUBLISHED
    await append_version(redis, run, ev.PolicyVersionRecord(version=1, stage=stage))
    async for _ in durable.recover(2, NoConversations()):
        pass
    await append_version(redis, run, ev.PolicyVersionRecord(version=2, stage=stage))
    assert [getattr(x, "version", 0) for x in await durable.follow()] == [2]
    assert await durable.follow() == []


async def test_a_group_that_was_retired_meanwhile_is_not_opened_again(
    redis: Redis, run: str
) -> None:
    """The router read the records before, and the bits after; it ends, and reads again."""
    from muster.streams import RunStreams

    streams = RunStreams(redis, run)
    durable = Durable(redis, streams)
    opening = OpenGroup("job-1", "job", "t", "d", 1, 0, SamplingParams())
    key = EpisodeKey(run, "job-1", 0, 0, 1)
    await durable.open_group(opening, key)
    await streams.retire("job-1", job="job", index=1, totals={"filtered": 1}, delete=[])
    with pytest.raises(Refused):
        await durable.open_group(opening, key)


async def test_tasks_in_memory_are_bounded(redis: Redis, run: str) -> None:
    from muster.streams import RunStreams

    streams = RunStreams(redis, run)
    durable = Durable(redis, streams, tasks_cached=2)
    for name in "abc":
        await redis.set(streams.key("task", name), name)
        assert await durable.task_archive(name) == name.encode()
    assert len(durable._tasks) == 2


async def test_a_fenced_router_ends_when_a_host_says_so(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async def go_on_for_ever() -> None:
        async with fleet(redis, run) as (_, host), router(redis, run, tmp_path) as it:
            host.refuse_exec = Fenced("a newer router owns the run")
            await it.stub.SubmitTaskSet(submission(), timeout=5)
            await asyncio.Event().wait()

    with pytest.raises(BaseExceptionGroup) as caught:
        await go_on_for_ever()
    assert caught.group_contains(Fenced)


async def test_watchers_and_jobs_are_bounded_and_a_closed_watch_frees_its_place(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with router(redis, run, tmp_path) as it:
        it.driver._section = RouterConfig(watchers_max=1, jobs_max=1)
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        with pytest.raises(Exhausted), rpc.calling("submit"):
            await it.stub.SubmitTaskSet(submission(job="other"), timeout=5)
        for _ in range(2):
            one = it.stub.WatchJob(rt.WatchJobRequest(job="job"), timeout=5)
            assert await one.read() is not grpc.aio.EOF
            with pytest.raises(Exhausted), rpc.calling("watch"):
                await it.stub.WatchJob(rt.WatchJobRequest(job="job"), timeout=5).read()
            one.cancel()
            await asyncio.sleep(0.3)


async def test_an_archive_under_another_digest_is_refused(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    task = submission().tasks[0]
    task = pb.TaskPackage(name=task.name, digest="0" * 64, archive=task.archive)
    async with router(redis, run, tmp_path) as it:
        with pytest.raises(InvalidInput), rpc.calling("submit"):
            await it.stub.SubmitTaskSet(submission(tasks=[task]), timeout=5)
