"""An evaluation through the real router and the real bank on a real server: no trainer needed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster import served
from muster.audit import audit
from muster.client import MusterClient, Progress
from muster.errors import InvalidInput, NotFound
from muster.fingerprint import ServingFingerprint
from muster.record import read_record
from muster.streams import RunStreams
from muster.types import Purpose, SamplingParams
from tests.integration.router_world import Router, answer, fleet, router
from tests.integration.test_readybank import BankProcess

TASKS = Path(__file__).parents[2] / "tasks"
HELD_OUT = [TASKS / "delete-file", TASKS / "first-lines"]


@asynccontextmanager
async def bank(folder: Path, run: str, redis_url: str) -> AsyncIterator[BankProcess]:
    process = BankProcess(folder, run, redis_url)
    process.start()
    try:
        yield process
    finally:
        process.end(signal.SIGKILL)


def client_of(it: Router) -> MusterClient:
    return MusterClient(it.address)


async def test_it_runs_beside_training_and_nothing_of_it_is_trained_on(
    redis: Redis, run: str, redis_url: str, tmp_path: Path
) -> None:
    rules = {"groups_per_batch": 1, "lag_max": 0, "repairs_max": 1, "generate_retries_max": 0}
    trained_by = ServingFingerprint(engine="scripted", dtype="bfloat16")
    await served.record(redis, run, trained_by)
    seen: list[Progress] = []
    async with (
        fleet(redis, run) as (replicas, _),
        bank(tmp_path, run, redis_url) as process,
        router(redis, run, tmp_path, **rules) as it,
        client_of(it) as client,
    ):
        lost: list[str] = []

        def once(request):  # type: ignore[no-untyped-def]
            key = request.episode
            if key.attempt == 0 and key.sibling == 1 and key.group.startswith("held"):
                lost.append(key.group)
                return answer([1], covered=0)  # not admitted: the attempt is made again
            return None

        replicas[0].spoil = once
        training = await client.submit(
            HELD_OUT,
            groups=3,
            group_size=2,
            job="training",
            sampling=SamplingParams(1.0),
            split="eval",
        )
        found = await client.evaluate(
            HELD_OUT,
            samples=3,
            sampling=SamplingParams(0.6),
            job="held",
            show=seen.append,
        )
        assert lost
        # The trainer never comes, so of its job only what the bound allows was opened.
        assert (await client.get(training)).groups_opened == 1
        with pytest.raises(InvalidInput, match="none of evaluation"):
            await client.evaluation(training)
        with pytest.raises(NotFound):
            await client.evaluation("another")
        process.end(signal.SIGKILL)
        process.start()  # what it reads back changes nothing
        assert await client.evaluation("held") == found
        await _until_retired(redis, run)
    assert found.complete
    assert (found.overall.samples, found.overall.passed, found.overall.infra) == (6, 6, 0)
    assert (found.overall.repaired, found.overall.pass_rate) == (2, 1.0)
    assert [version.versions for version in found.versions] == [(0,)]
    assert [task.task for task in found.tasks] == ["muster/delete-file", "muster/first-lines"]
    assert found.tasks[0].instances == ("muster/delete-file@1000000",)
    assert found.warnings == (
        "sampling differs from training: temperature: 0.6 here, 1 there",
        "served otherwise than in training: dtype: float32, bfloat16 (replica r0 first)",
    )
    assert seen[-1].purpose is Purpose.EVALUATE
    assert (seen[-1].groups_evaluated, seen[-1].groups_complete) == (2, 2)
    assert seen[-1].episodes_finished == 8
    record = await read_record(redis, run, tmp_path / "state" / "history" / run)
    checked = audit(record)
    assert checked.ok, checked.problems
    assert (checked.totals.groups_evaluated, checked.totals.groups_trained) == (2, 0)


async def _until_retired(redis: Redis, run: str) -> None:
    """Payloads of evaluated groups go, those of the trainer's stay."""
    streams = RunStreams(redis, run)
    async with asyncio.timeout(30):
        while True:
            if not [key async for key in redis.scan_iter(match="*:p:held*")]:
                break
            await asyncio.sleep(0.1)
    assert [key async for key in redis.scan_iter(match="*:p:training*")]
    assert await redis.get(streams.key("retired", "held")) is not None


async def test_a_router_that_takes_over_brings_an_evaluation_to_its_end(
    redis: Redis, run: str, redis_url: str, tmp_path: Path
) -> None:
    async with fleet(redis, run) as (replicas, _), bank(tmp_path, run, redis_url):
        stuck = asyncio.Event()

        def only_one(request):  # type: ignore[no-untyped-def]
            if request.episode.sibling:
                stuck.set()
                return answer([1], covered=0)
            return None

        replicas[0].spoil = only_one
        async with router(redis, run, tmp_path) as it, client_of(it) as client:
            await client.submit(
                HELD_OUT[0],
                groups=1,
                group_size=3,
                split="eval",
                job="held",
                purpose=Purpose.EVALUATE,
            )
            await stuck.wait()
        replicas[0].spoil = lambda request: None
        async with router(redis, run, tmp_path) as it, client_of(it) as client:
            last = [progress async for progress in client.watch("held")][-1]
            found = await client.evaluation("held")
    assert (last.purpose, last.groups_evaluated) == (Purpose.EVALUATE, 1)
    assert (found.complete, found.overall.passed) == (True, 3)
