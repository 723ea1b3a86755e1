"""Two banks of one run: one leads, the other takes over, and the former one is refused."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from redis.asyncio import Redis

from muster.registry import Registry
from muster.streams import RunStreams, next_epoch
from sim.builders import scored
from tests.integration.test_readybank import (
    DEADLINE_S,
    BankProcess,
    Router,
    _acknowledge,
    _ended,
    _lease,
    _register,
    _stub,
)


async def _standing_by(redis: Redis, run: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await Registry(redis, run).list("standby"):  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.02)


async def test_a_standby_goes_on_where_a_stopped_bank_was(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    """The first one holds the configured port, is stopped, and wakes after the other leads."""
    router = Router(redis, run, await next_epoch(redis, run, "router"))
    await router.group("job-0", scored(1.0), scored(0.0))
    (tmp_path / "b").mkdir()
    first, second = (
        BankProcess(tmp_path, run, redis_url),
        BankProcess(tmp_path / "b", run, redis_url),
    )
    with _ended(first), _ended(second):
        first.start()
        async with _stub(redis, run) as stub:
            await _register(stub, run, 1)
            leased = await _lease(stub, run, 1, groups=1)
        (held,) = await Registry(redis, run).list("readybank")
        with second.config.open("a") as file:
            file.write(f'[readybank]\nlisten = "{held.address}"\n')
        second.start()
        await _standing_by(redis, run)
        assert [e.id for e in await Registry(redis, run).list("readybank")] == ["bank-1"]
        assert first.process is not None
        os.killpg(first.process.pid, signal.SIGSTOP)
        async with _stub(redis, run, after="bank-1") as stub:
            assert await _lease(stub, run, 1, groups=1) == leased
            assert await _acknowledge(stub, run, 1) == 1
        (newest,) = [e for e in await Registry(redis, run).list("readybank") if e.id == "bank-2"]
        assert newest.address != held.address
        os.killpg(first.process.pid, signal.SIGCONT)
        assert await asyncio.to_thread(first.process.wait, DEADLINE_S) == 2
        assert second.end(signal.SIGTERM) == 0
    assert "a newer readybank" in (tmp_path / "log").read_text()
    assert len(await RunStreams(redis, run).read_all("fates")) == 1


async def test_a_standby_that_is_asked_to_stop_leaves_the_leader_alone(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    (tmp_path / "b").mkdir()
    first, second = (
        BankProcess(tmp_path, run, redis_url),
        BankProcess(tmp_path / "b", run, redis_url),
    )
    with _ended(first), _ended(second):
        first.start()
        async with _stub(redis, run) as stub:
            second.start()
            await _standing_by(redis, run)
            assert second.end(signal.SIGTERM) == 0
            await _register(stub, run, 1)
        assert first.end(signal.SIGTERM) == 0
    assert int(await redis.get(f"m:{{{run}}}:epoch:readybank")) == 1
