"""Router and sandbox service together: what one promises is what the other relies on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from muster.archive import TaskFile, pack_files
from muster.streams import RunStreams
from muster.types import EpisodeKey
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from muster.v1 import inference_pb2 as inf
from muster.v1 import router_pb2 as rt
from services.sandbox.adapters.fake import FakeBackend, open_fake
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from services.sandbox.server import SandboxServicer
from tests.integration.router_world import answer, fleet, router
from tests.integration.test_router import complete, until
from tests.integration.test_router_resume import Gate, Stuck, recorded, trajectories, turn_of
from tests.unit.router.test_conversation import END

TURNS = 5
TEXTS = {
    "instruction.md": "Count.",
    "task.toml": "[metadata]\nmuster_max_turns = 6\n",
    "environment/Dockerfile": "FROM scratch\nWORKDIR /app\n",
    "tests/test.sh": "test -f log && echo 1 > /logs/verifier/reward.txt",
}


def submission() -> rt.SubmitTaskSetRequest:
    archive = pack_files({path: TaskFile(0o644, text.encode()) for path, text in TEXTS.items()})
    digest = hashlib.sha256(archive).hexdigest()
    task = pb.TaskPackage(name="count", digest=digest, archive=archive)
    sampling = pb.SamplingParams(temperature=1.0, top_p=1.0)
    return rt.SubmitTaskSetRequest(
        job="job", tasks=[task], groups=1, group_size=2, sampling=sampling
    )


def counting(request: inf.GenerateRequest) -> list[inf.GenerateResponse]:
    """Every step tells all former ones: a wrong replay shows."""
    turn = turn_of(request)
    text = "DONE" if turn == TURNS else f"```bash\necho {turn} >> log; cat log\n```"
    return answer([*map(ord, text), END])


@asynccontextmanager
async def hosted(redis: Redis, run: str) -> AsyncIterator[tuple[FakeBackend, SandboxHost]]:
    async with (
        open_fake() as backend,
        SandboxHost(backend, SandboxConfig(warm_max=0), "h0") as host,
    ):
        hosts: Any = [SandboxServicer(host)]
        async with fleet(redis, run, hosts=hosts) as (replicas, _):
            replicas[0].spoil = counting
            yield backend, host


@asynccontextmanager
async def world(redis: Redis, run: str) -> AsyncIterator[FakeBackend]:
    async with hosted(redis, run) as (backend, _):
        yield backend


async def plain(redis: Redis, run: str, folder: Path) -> dict[tuple[int, int], list[int]]:
    async with world(redis, run), router(redis, run, folder) as it:
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        await until(it.stub, complete)
    return await trajectories(redis, run)


async def test_the_next_router_goes_on_in_the_living_boxes(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    want = await plain(redis, f"{run}-plain", tmp_path / "plain")
    async with world(redis, run) as backend:
        async with router(redis, run, tmp_path, Stuck) as first:
            gate = first.driver._durable.gate = Gate()  # type: ignore[attr-defined]
            await first.stub.SubmitTaskSet(submission(), timeout=5)
            await asyncio.wait_for(gate.reached.wait(), 10)
        boxes = backend.running
        async with router(redis, run, tmp_path) as second:
            progress = await until(second.stub, complete)
    assert await trajectories(redis, run) == want
    assert (progress.repairs, dict(progress.outcomes)) == (0, {"model_success": 2})
    turns = [x.turn_finished for x in await recorded(redis, run, "turn_finished")]
    assert {t.box for t in turns} == set(boxes)
    assert [t.turn for t in turns if t.resumed] == [3, 3]


async def test_a_box_lost_with_its_step_is_rebuilt(redis: Redis, run: str, tmp_path: Path) -> None:
    want = await plain(redis, f"{run}-plain", tmp_path / "plain")
    async with world(redis, run) as backend:
        async with router(redis, run, tmp_path, Stuck) as it:
            gate = it.driver._durable.gate = Gate()  # type: ignore[attr-defined]
            await it.stub.SubmitTaskSet(submission(), timeout=5)
            await asyncio.wait_for(gate.reached.wait(), 10)
            backend.fail_steps = 1  # of turn 4, whichever comes first
            gate.open.set()
            progress = await until(it.stub, complete)
    assert await trajectories(redis, run) == want
    assert (progress.repairs, dict(progress.outcomes)) == (1, {"model_success": 2})
    (told,) = [x.box_restored for x in await recorded(redis, run, "box_restored")]
    assert told.turns_replayed == 4
    outcomes = await RunStreams(redis, run).read_all("outcomes")
    assert sorted(ev.OutcomeLabel.FromString(m.data).replays for m in outcomes) == [0, 1]


async def test_a_box_that_is_ahead_of_its_records_is_rebuilt_from_them(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    want = await plain(redis, f"{run}-plain", tmp_path / "plain")
    async with hosted(redis, run) as (backend, host):
        async with router(redis, run, tmp_path, Stuck) as first:
            gate = first.driver._durable.gate = Gate()  # type: ignore[attr-defined]
            await first.stub.SubmitTaskSet(submission(), timeout=5)
            await asyncio.wait_for(gate.reached.wait(), 10)
        # As if the records of turn 4 were lost with the power.
        (box, *_) = sorted(backend.running)
        whose = next(living for living in await host.claim(run, first.epoch) if living.box == box)
        key: EpisodeKey = whose.key
        await host.execute(key, box, 4, "echo lost >> log", 10, after=3)
        async with router(redis, run, tmp_path) as second:
            progress = await until(second.stub, complete)
    assert await trajectories(redis, run) == want
    assert (progress.repairs, dict(progress.outcomes)) == (1, {"model_success": 2})
    assert len(await recorded(redis, run, "box_restored")) == 1


async def test_boxes_that_nobody_goes_on_in_are_given_back_at_the_takeover(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with hosted(redis, run) as (backend, _):
        async with router(redis, run, tmp_path, Stuck) as first:
            gate = first.driver._durable.gate = Gate()  # type: ignore[attr-defined]
            await first.stub.SubmitTaskSet(submission(), timeout=5)
            await asyncio.wait_for(gate.reached.wait(), 10)
        assert len(backend.running) == 2
        await redis.delete(f"m:{{{run}}}:events", f"m:{{{run}}}:jobs")  # nobody knows of it now
        async with router(redis, run, tmp_path), asyncio.timeout(10):
            while backend.running:  # noqa: ASYNC110 - nobody is told of it
                await asyncio.sleep(0.01)
