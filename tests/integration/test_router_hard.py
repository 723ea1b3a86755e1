"""The router's shell where the world misbehaves."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from muster import journal, rpc
from muster.errors import Exhausted, InvalidInput, MusterError, Unavailable
from muster.v1 import common_pb2 as pb
from muster.v1 import sandbox_pb2 as sbx
from services.router.adapters.clocks import Clocks
from tests.integration.router_world import (
    REPLY,
    ScriptedHost,
    ScriptedReplica,
    answer,
    fleet,
    router,
)
from tests.integration.test_router import complete, submission, until
from tests.integration.test_router_resume import submission as of_six_turns


@pytest.mark.parametrize("kind", ["sandbox/h0", "inference/r0"])
async def test_a_call_in_flight_outlives_its_peers_absence_from_the_registry(
    redis: Redis, run: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = asyncio.Event(), asyncio.Event()
    plain = ScriptedHost.Exec

    async def step(self: ScriptedHost, request: Any, context: Any) -> Any:
        started.set()
        await go.wait()
        return await plain(self, request, context)

    async def sample(self: ScriptedReplica, request: Any, context: Any) -> Any:
        started.set()
        await go.wait()
        for part in answer(REPLY):
            yield part

    if kind.startswith("sandbox"):
        monkeypatch.setattr(ScriptedHost, "Exec", step)
    else:
        monkeypatch.setattr(ScriptedReplica, "Generate", sample)
    async with fleet(redis, run), router(redis, run, tmp_path) as it:
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        await asyncio.wait_for(started.wait(), 5)
        for _ in range(12):  # as after a restart of Redis that took longer than the entries live
            await redis.hdel(f"m:{{{run}}}:registry", kind)
            await asyncio.sleep(0.1)
        go.set()
        progress = await until(it.stub, complete)
    assert progress.outcomes["model_success"] == 2
    assert progress.repairs == 0


async def test_a_replica_that_names_no_reason_fails_the_turn_not_the_router(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with fleet(redis, run) as (replicas, _), router(redis, run, tmp_path) as it:

        def nameless(request: Any) -> Any:
            parts = answer(REPLY)
            parts[-1].finish.reason = 0
            return parts if len(replicas[0].requests) == 1 else None

        replicas[0].spoil = nameless
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        await until(it.stub, complete)


async def test_a_redis_that_is_full_for_a_moment_is_waited_for(
    own_redis: Any, run: str, tmp_path: Path
) -> None:
    from muster.config import RedisConfig
    from muster.streams import connect

    own_redis.start()
    async with connect(RedisConfig(url=own_redis.url)) as redis:
        async with fleet(redis, run) as (replicas, _), router(redis, run, tmp_path) as it:
            full = asyncio.Event()

            def fill(request: Any) -> Any:
                full.set()
                return None

            replicas[0].spoil = fill
            await it.stub.SubmitTaskSet(submission(), timeout=5)
            await full.wait()
            await redis.config_set("maxmemory", "1")
            await asyncio.sleep(0.5)
            await redis.config_set("maxmemory", "0")
            await until(it.stub, complete)


async def test_two_submissions_at_once_under_one_name_are_one_or_one_is_refused(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    refused: list[InvalidInput] = []
    async with router(redis, run, tmp_path) as it:

        async def submit(groups: int) -> None:
            try:
                with rpc.calling("submit"):
                    await it.stub.SubmitTaskSet(submission(groups=groups), timeout=5)
            except InvalidInput as error:
                refused.append(error)

        async with asyncio.TaskGroup() as tasks:
            for groups in (1, 2):
                tasks.create_task(submit(groups))
    assert [error.field for error in refused] == ["job"]


async def test_a_repeat_with_other_sampling_is_refused(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with router(redis, run, tmp_path) as it:
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        hot = pb.SamplingParams(temperature=0.5, top_p=1.0)
        with pytest.raises(InvalidInput), rpc.calling("submit"):
            await it.stub.SubmitTaskSet(submission(sampling=hot), timeout=5)


async def test_finished_streams_leave_no_span_attached(
    redis: Redis, run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(redis, run), router(redis, run, tmp_path) as it:
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        await until(it.stub, complete)
    assert not [r for r in caplog.records if "detach" in r.getMessage()]


async def test_a_journal_with_a_reward_that_is_no_number_replays(
    redis: Redis, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def verify(self: ScriptedHost, request: Any, context: Any) -> sbx.VerifyResponse:
        return sbx.VerifyResponse(status=sbx.VERDICT_STATUS_REWARDED, reward=float("nan"))

    monkeypatch.setattr(ScriptedHost, "Verify", verify)
    async with fleet(redis, run), router(redis, run, tmp_path) as it:
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        progress = await until(it.stub, complete)
    assert progress.outcomes == {"model_failure": 2}
    assert journal.verify(it.journal).problem == ""


async def test_a_wall_clock_that_is_set_charges_the_model_for_nothing(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    jumps = itertools.count(1_000.0, 1_000.0)
    clocks = Clocks(wall=lambda: next(jumps))
    world = router(redis, run, tmp_path, clocks=clocks, episode_timeout_s=60.0)
    async with fleet(redis, run), world as it:
        await it.stub.SubmitTaskSet(of_six_turns(), timeout=5)
        progress = await until(it.stub, complete)
    assert (progress.turns, progress.outcomes) == (12, {"model_success": 2})


@pytest.mark.parametrize(
    "error",
    [
        Exhausted("5 requests are running", field="inference.max_requests"),
        Unavailable("the replica is fenced", field="replica.state", value="fenced"),
    ],
    ids=["full", "fenced"],
)
async def test_a_replica_that_takes_nothing_now_is_waited_for(
    redis: Redis, run: str, tmp_path: Path, error: MusterError
) -> None:
    world = router(redis, run, tmp_path, generate_retries_max=0, repairs_max=0, retry_after_s=0.01)
    async with fleet(redis, run) as (replicas, _), world as it:

        def busy(request: Any) -> None:
            if len(replicas[0].requests) < 6:
                raise error

        replicas[0].spoil = busy
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        progress = await until(it.stub, complete)
    assert progress.outcomes == {"model_success": 2}


async def test_a_verification_may_wait_for_a_place_on_its_host(
    redis: Redis, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []

    async def verify(self: ScriptedHost, request: Any, context: Any) -> sbx.VerifyResponse:
        left.append(context.time_remaining())
        return sbx.VerifyResponse(status=sbx.VERDICT_STATUS_REWARDED, reward=1.0)

    monkeypatch.setattr(ScriptedHost, "Verify", verify)
    async with fleet(redis, run), router(redis, run, tmp_path, verify_queue_s=5_000.0) as it:
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        await until(it.stub, complete)
    assert min(left) > 5_000.0
