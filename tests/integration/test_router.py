"""The router's shell against real gRPC and a real Redis: what is written, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from muster import journal, rpc
from muster.errors import Fenced, InvalidInput, NotFound
from muster.streams import RunStreams
from muster.taskset import read_task_set
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from muster.v1 import router_pb2 as rt
from services.router.adapters.durable import Durable
from tests.integration.router_world import REPLY, answer, decoded, fleet, router

TASKS = Path(__file__).parents[2] / "tasks"


def submission(**fields: Any) -> rt.SubmitTaskSetRequest:
    task = next(t for t in read_task_set(TASKS) if t.name.endswith("touch-file"))
    package = pb.TaskPackage(name=task.name, digest=task.digest, archive=task.archive)
    given: dict[str, Any] = {
        "job": "job",
        "tasks": [package],
        "groups": 1,
        "group_size": 2,
        "sampling": pb.SamplingParams(temperature=1.0, top_p=1.0),
    }
    return rt.SubmitTaskSetRequest(**(given | fields))


async def until(
    stub: Any, done: Callable[[rt.JobProgress], bool], job: str = "job"
) -> rt.JobProgress:
    """Watch the job until `done`; the call's deadline bounds it."""
    call = stub.WatchJob(rt.WatchJobRequest(job=job), timeout=60)
    try:
        async for response in call:
            if done(response.progress):
                return response.progress
    finally:
        call.cancel()
    raise AssertionError("the watch ended early")


async def events(redis: Redis, run: str) -> list[ev.TrajectoryEvent]:
    found = await RunStreams(redis, run).read_all("events")
    return [ev.TrajectoryEvent.FromString(m.data) for m in found]


def complete(progress: rt.JobProgress) -> bool:
    return progress.groups_complete == progress.groups_total


async def test_a_task_set_becomes_recorded_turns_and_labels(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with fleet(redis, run) as (replicas, host), router(redis, run, tmp_path) as it:
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        progress = await until(it.stub, complete)
        assert progress.outcomes == {"model_success": 2}
        await host.until_released(2)
    kinds = [e.WhichOneof("event") for e in await events(redis, run)]
    turns = ["turn_finished"] * 2 + ["turn_intended"] * 2
    assert sorted(kinds) == ["episode_finished"] * 2 + ["group_opened"] + turns
    assert sorted(host.released) == ["job-00000.0.0", "job-00000.1.0"]
    turn = next(e for e in await events(redis, run) if e.HasField("turn_finished")).turn_finished
    assert turn.sampled_tokens == len(REPLY)
    assert turn.prompt_tokens == len(decoded(replicas[0].requests[0]))
    replayed = journal.verify(it.journal)
    assert (replayed.problem, replayed.events > 10) == ("", True)


async def test_groups_become_durable_in_the_order_of_their_job(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    """The bank tells by it which group was overtaken, and a restarted router reads it."""
    rules = {"groups_per_batch": 48}
    async with fleet(redis, run), router(redis, run, tmp_path, **rules) as it:
        await it.stub.SubmitTaskSet(submission(groups=48), timeout=20)
        await until(it.stub, complete)
    found = await events(redis, run)
    opened = [e.episode.group for e in found if e.HasField("group_opened")]
    assert opened == [f"job-{n:05}" for n in range(48)]


async def test_an_exec_whose_answer_is_lost_is_asked_again_and_runs_once(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with fleet(redis, run) as (_, host), router(redis, run, tmp_path) as it:
        host.lose_first = True
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        progress = await until(it.stub, complete)
    assert len(host.calls) == 4
    assert len(host.executed) == 2
    assert progress.repairs == 0


@pytest.mark.parametrize("covered", [0, len(REPLY) - 1, len(REPLY) + 1])
async def test_tokens_without_exactly_one_version_each_are_not_admitted(
    redis: Redis, run: str, tmp_path: Path, covered: int
) -> None:
    async with fleet(redis, run, replicas=2) as (replicas, _), router(redis, run, tmp_path) as it:
        replicas[0].spoil = lambda request: answer(REPLY, covered=covered)
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        await until(it.stub, complete)
    turns = [e.turn_finished for e in await events(redis, run) if e.HasField("turn_finished")]
    assert {t.replica for t in turns} == {"r1"}
    assert all(t.spans[0].end == t.sampled_tokens for t in turns)


async def test_a_killed_routers_group_is_finished_by_the_next_without_a_lost_or_doubled_sibling(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with fleet(redis, run) as (replicas, _):
        stuck = asyncio.Event()

        async with router(redis, run, tmp_path) as first:
            await first.stub.SubmitTaskSet(submission(group_size=3), timeout=5)

            def only_one(request: Any) -> Any:
                if request.episode.sibling != 0:
                    stuck.set()
                    return answer(REPLY, covered=0)  # never admitted: these siblings hang on
                return None

            replicas[0].spoil = only_one
            await until(first.stub, lambda p: p.episodes_finished >= 1)
            await stuck.wait()
        replicas[0].spoil = lambda request: None
        async with router(redis, run, tmp_path) as second:
            progress = await until(second.stub, complete)
    assert progress.groups_opened == 1
    ended = [e.episode for e in await events(redis, run) if e.HasField("episode_finished")]
    good = sorted({(k.sibling) for k in ended})
    assert good == [0, 1, 2]
    assert len({(k.sibling, k.attempt) for k in ended}) == len(ended)


class NeverSaysWhatItRead(Durable):
    """So that nothing is written before the submission, however long that takes to come."""

    async def mark_read(self) -> None:
        return None


async def test_a_former_router_that_wakes_is_refused_at_its_next_write(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with (
        router(redis, run, tmp_path, NeverSaysWhatItRead) as former,
        router(redis, run, tmp_path) as newer,
    ):
        assert newer.epoch == former.epoch + 1
        with pytest.raises(Fenced) as caught, rpc.calling("submit"):
            await former.stub.SubmitTaskSet(submission(), timeout=5)
        assert str(newer.epoch) in caught.value.way_out
        await newer.stub.SubmitTaskSet(submission(), timeout=5)
    assert len(await RunStreams(redis, run).read_all("jobs")) == 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"group_size": 1}, "group_size"),
        ({"groups": 0}, "groups"),
        ({"groups": 101}, "groups"),
        ({"tasks": []}, "tasks"),
        ({"job": "no spaces"}, "job"),
        ({"sampling": pb.SamplingParams(temperature=0.0, top_p=1.0)}, "sampling.temperature"),
        ({"sampling": pb.SamplingParams(temperature=1.0, top_p=0.9)}, "sampling.top_p"),
        ({"sampling": pb.SamplingParams(temperature=1.0, top_p=1.0, top_k=1)}, "sampling.top_k"),
    ],
)
async def test_bad_submissions_are_refused_whole_naming_field_and_way_out(
    redis: Redis, run: str, tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    async with router(redis, run, tmp_path) as it:
        with pytest.raises(InvalidInput) as caught, rpc.calling("submit"):
            await it.stub.SubmitTaskSet(submission(**fields), timeout=5)
    assert caught.value.field == named
    assert caught.value.way_out
    assert not await RunStreams(redis, run).read_all("jobs")


async def test_a_repeated_submission_has_one_effect_and_a_different_one_is_refused(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with router(redis, run, tmp_path) as it:
        for _ in range(2):
            await it.stub.SubmitTaskSet(submission(), timeout=5)
        with pytest.raises(InvalidInput) as caught, rpc.calling("submit"):
            await it.stub.SubmitTaskSet(submission(groups=2), timeout=5)
    assert caught.value.field == "job"
    assert len(await RunStreams(redis, run).read_all("jobs")) == 1


async def test_watching_an_unknown_job_says_so(redis: Redis, run: str, tmp_path: Path) -> None:
    async with router(redis, run, tmp_path) as it:
        with pytest.raises(NotFound), rpc.calling("watch"):
            async for _ in it.stub.WatchJob(rt.WatchJobRequest(job="no"), timeout=5):
                pass


async def test_a_cancelled_job_stays_cancelled_across_a_restart(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with router(redis, run, tmp_path) as it:
        await it.stub.SubmitTaskSet(submission(groups=5), timeout=5)
        answer_ = await it.stub.CancelJob(rt.CancelJobRequest(job="job"), timeout=5)
        assert answer_.progress.state == rt.JOB_STATE_CANCELLED
    async with router(redis, run, tmp_path) as again:
        got = await again.stub.GetJob(rt.GetJobRequest(job="job"), timeout=5)
        assert got.progress.state == rt.JOB_STATE_CANCELLED
        assert got.progress.episodes_running == 0
