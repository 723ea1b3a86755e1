"""What is over goes from a real server, whatever the bank is killed at; nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from muster.errors import InvalidInput, NotFound, Refused, Unavailable
from muster.history import History
from muster.registry import Registry
from muster.rpc import calling
from muster.streams import RunStreams, StreamEntry, next_epoch
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from sim.builders import INFRA, scored
from tests.integration.test_readybank import (
    DEADLINE_S,
    BankProcess,
    Router,
    _content,
    _ended,
    _lease,
    _stub,
)
from tests.versions import append_version

AT = (  # every effect of clearing up, and what comes before it
    "readybank.filter.after",
    "readybank.train.before",
    "readybank.train.after",
    "readybank.retire.before@2",
    "readybank.retire.after@2",
    "readybank.archive.before",
    "readybank.archive.after",
    "readybank.trim.before",
    "readybank.trim.after",
)


async def _register(stub: object, run: str, epoch: int, durable: int, kept: int) -> None:
    request = rb.RegisterTrainerRequest(
        run=run, trainer_epoch=epoch, last_durable_step=durable, oldest_kept_step=kept
    )
    with calling("register"):
        await stub.RegisterTrainer(request, timeout=DEADLINE_S)  # type: ignore[attr-defined]


async def _acknowledge(stub: object, run: str, step: int, kept: int) -> None:
    request = rb.AcknowledgeBatchRequest(run=run, trainer_epoch=1, step=step, oldest_kept_step=kept)
    with calling("acknowledge"):
        await stub.AcknowledgeBatch(request, timeout=DEADLINE_S)  # type: ignore[attr-defined]


async def _until_trimmed(redis: Redis, run: str) -> None:
    """No more is left than the last entry that was read, and the batch of the mark."""
    streams = RunStreams(redis, run)
    async with asyncio.timeout(DEADLINE_S):
        for stream, left in (("events", 1), ("outcomes", 1), ("fates", 0), ("batches", 2)):
            while await redis.xlen(streams.key(stream)) > left:  # noqa: ASYNC110 - another process does it
                await asyncio.sleep(0.02)


async def _groups(redis: Redis, run: str) -> None:
    """job-0 is filtered, job-1 and job-2 are batches of their own."""
    router = Router(redis, run, await next_epoch(redis, run, "router"))
    await router.group("job-0", scored(1.0), INFRA)
    await router.episode("job-0", 1, replace(INFRA, replays=3), attempt=1)
    await router.episode("job-0", 1, INFRA, attempt=2)
    await router.group("job-1", scored(1.0), scored(0.0))
    await router.group("job-2", scored(0.0), scored(0.0))
    read = dict.fromkeys(("versions", "fates", "batches"), "9999999999999-0")  # whatever comes
    await RunStreams(redis, run, role="router").mark_read(read)


def _fast(bank: BankProcess) -> None:
    with bank.config.open("a") as file:
        file.write("[readybank]\ntick_s = 0.05\n")


@pytest.mark.parametrize("where", AT)
async def test_a_kill_at_any_effect_leaves_nothing_behind(
    tmp_path: Path,
    redis: Redis,
    run: str,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    await _groups(redis, run)
    name, _, at = where.partition("@")
    bank, streams = BankProcess(tmp_path, run, redis_url), RunStreams(redis, run)
    _fast(bank)
    with _ended(bank):
        monkeypatch.setenv("MUSTER_TEST_FAILPOINTS", f"{name}=kill@{at or 1}")
        bank.start()
        monkeypatch.delenv("MUSTER_TEST_FAILPOINTS")
        with contextlib.suppress(Unavailable):  # the bank ends under its trainer
            if await _comes(redis, run, bank):
                await _train_two(redis, run)
        assert bank.process is not None
        assert await asyncio.to_thread(bank.process.wait, 10) == -signal.SIGKILL
        bank.start()
        await _train_two(redis, run, after=1)
        await _until_trimmed(redis, run)
        assert bank.end(signal.SIGTERM) == 0
    assert [key async for key in redis.scan_iter(streams.key("p", "*"))] == []
    totals = await redis.hgetall(streams.key("totals", "job"))
    assert {k.decode(): int(v) for k, v in totals.items()} == {
        "trained": 2,
        "filtered": 1,
        "episodes": 8,
        "turns": 16,
        "repairs": 5,
        "outcome:infra_failure": 3,
        "outcome:model_success": 2,
        "outcome:model_failure": 3,
    }
    assert await redis.get(streams.key("retired", "job")) == b"\xe0"
    assert await redis.hget(streams.key("mark"), "step") == b"2"
    assert await redis.hlen(streams.key("seen", "fates")) == 0
    assert await redis.hlen(streams.key("seen", "batches")) == 2  # of the mark
    kept = History(bank.state / "history" / run)
    read = {m.id for m in [*kept.read("events"), *await streams.read_all("events")]}
    assert len(read) == 3 + 8 * 3  # openings, and two turns and an end for each attempt


async def _comes(redis: Redis, run: str, bank: BankProcess) -> bool:
    """Wait until it has announced itself; False when it has ended before."""
    assert bank.process is not None
    while not await Registry(redis, run).list("readybank"):
        if bank.process.poll() is not None:
            return False
        await asyncio.sleep(0.02)
    return True


async def _train_two(redis: Redis, run: str, after: int = 0) -> None:
    """A trainer that keeps one checkpoint; `after`: epochs of the banks that are gone."""
    async with _stub(redis, run, after=f"bank-{after}") as stub:
        mark = int(await redis.hget(RunStreams(redis, run).key("mark"), "step") or 0)
        await _register(stub, run, 1, mark, mark)
        for step in range(mark + 1, 3):
            await _lease(stub, run, step, groups=1)
            await _acknowledge(stub, run, step, kept=step)


async def test_what_a_trainer_may_go_back_to_stays(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    await _groups(redis, run)
    for version in range(1, 4):
        record = ev.PolicyVersionRecord(version=version, parent=version - 1)
        record.stage = ev.VERSION_STAGE_PUBLISHED
        await append_version(redis, run, record)
    bank, streams = BankProcess(tmp_path, run, redis_url), RunStreams(redis, run)
    _fast(bank)
    with _ended(bank):
        bank.start()
        async with _stub(redis, run) as stub:
            await _register(stub, run, 1, 0, 0)
            first = await _lease(stub, run, 1, groups=1)
            second = await _lease(stub, run, 2, groups=1)
            await _acknowledge(stub, run, 2, kept=1)
            async with asyncio.timeout(DEADLINE_S):
                while await redis.xlen(streams.key("outcomes")) > 2:  # noqa: ASYNC110 - another process does it
                    await asyncio.sleep(0.02)
            await _register(stub, run, 2, 1, 1)
            again = await _lease(stub, run, 2, epoch=2, groups=1)
            assert _content(again) == _content(second)
            with pytest.raises(Refused) as caught:
                await _register(stub, run, 3, 0, 0)
    assert "restore a checkpoint of step 1" in caught.value.way_out
    assert first != second
    left = sorted([key.decode() async for key in redis.scan_iter(streams.key("p", "*"))])
    assert left == [streams.key("p", f"job-2.{n}.0.{t}") for n in (0, 1) for t in (0, 1)]
    assert len(await streams.read_all("versions")) == 3


@pytest.mark.parametrize(
    ("step", "kept", "field"),
    [(0, 0, "step"), (1, 2, "oldest_kept_step"), (1, -1, "oldest_kept_step")],
)
async def test_no_trainer_has_more_deleted_than_it_has(
    tmp_path: Path, redis: Redis, run: str, redis_url: str, step: int, kept: int, field: str
) -> None:
    await _groups(redis, run)
    bank = BankProcess(tmp_path, run, redis_url)
    with _ended(bank):
        bank.start()
        async with _stub(redis, run) as stub:
            await _register(stub, run, 1, 0, 0)
            await _lease(stub, run, 1, groups=1)
            with pytest.raises(InvalidInput) as caught:
                await _acknowledge(stub, run, step, kept)
    assert caught.value.field == field


async def test_a_dead_letter_is_kept_once_and_a_batch_is_explained(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    router = Router(redis, run, await next_epoch(redis, run, "router"))
    await router.open("job-0", 2)
    await router.episode("job-0", 0, scored(1.0))
    streams = RunStreams(redis, run)
    await streams.append([StreamEntry("events", "events", "x", b"\xff\xff\xff")])
    await streams.append([StreamEntry("fates", "other", "x", b"\xff\xff\xff")])
    bank = BankProcess(tmp_path, run, redis_url)
    with _ended(bank):
        for after in range(2):
            bank.start()
            async with _stub(redis, run, after=f"bank-{after}") as stub:
                found = await stub.ExplainBatch(rb.ExplainBatchRequest(run=run), timeout=DEADLINE_S)
                group = await stub.ExplainBatch(
                    rb.ExplainBatchRequest(run=run, group="job-0"), timeout=DEADLINE_S
                )
                with pytest.raises(NotFound), calling("explain"):
                    await stub.ExplainBatch(
                        rb.ExplainBatchRequest(run=run, group="no"), timeout=DEADLINE_S
                    )
            bank.end(signal.SIGKILL)
    assert list(found.open_groups) == ["job-0"]
    assert found.waiting[1].waits_for == "sibling 1"
    assert [w.subject for w in group.waiting] == ["job-0", "job-0.0.0", "job-0.1.0"]
    dead = await redis.xrange(streams.key("dead"))
    assert sorted(fields[b"stream"] for _, fields in dead) == [b"events", b"fates"]
    assert {fields[b"d"] for _, fields in dead} == {b"\xff\xff\xff"}
    assert all(fields[b"reason"] for _, fields in dead)
