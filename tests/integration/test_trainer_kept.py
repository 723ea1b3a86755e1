"""A trainer that comes back, from each place where its newest checkpoints may lie, to a bank that
has deleted what they all have: it is taken, and trains each step once.

The bank is a process that is started anew meanwhile; the trainer's driver runs here, on the fake
policy.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster.bank_calls import GrpcBank
from muster.registry import Registry
from muster.streams import RunStreams, next_epoch
from muster.trainer_epoch import take_epoch
from services.trainer.adapters.checkpoint import CheckpointStore
from services.trainer.adapters.fake import FakePolicy
from services.trainer.adapters.version_log import RedisVersionLog
from services.trainer.driver import Driver, DriverSettings
from sim.builders import scored
from tests.integration.test_readybank import BankProcess, Router, _ended
from tests.unit.trainer.fakes import FakeFleet


class Trainer:
    """Incarnations of one trainer."""

    def __init__(self, folder: Path, redis: Redis, run: str, every: int, kept: int):
        self.folder, self.redis, self.run = folder, redis, run
        self.every, self.kept = every, kept

    @asynccontextmanager
    async def running(self, start_step: int | None = None) -> AsyncIterator[Driver]:
        epoch = await take_epoch(self.redis, self.run, 0)
        settings = DriverSettings(
            self.run,
            epoch,
            self.folder,
            retry_s=30.0,
            retry_first_s=0.01,
            checkpoint_every=self.every,
            start_step=start_step,
        )
        bank = GrpcBank(
            Registry(self.redis, self.run),
            run=self.run,
            epoch=epoch,
            groups=1,
            lease_wait_s=30.0,
            call_deadline_s=10.0,
        )
        driver = Driver(
            settings,
            load=FakePolicy.load,
            store=CheckpointStore(self.folder / "checkpoints", self.run, self.kept),
            bank=bank,
            versions=RedisVersionLog(self.redis, self.run, epoch),
            fleet=FakeFleet(),
        )
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(driver.run(stopping))
            yield driver
            stopping.set()

    def trained_on(self, step: int) -> list[int]:
        path = self.folder / "checkpoints" / f"step-{step:06d}" / "fake.json"
        found: list[int] = json.loads(path.read_text("utf-8"))
        return found


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Bounded; nobody is told of what is waited for."""
    async with asyncio.timeout(60):
        while not await check():  # noqa: ASYNC110 - as the docstring says
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("goes_back", [False, True], ids=["restarts", "goes-back"])
@pytest.mark.parametrize("kept", [1, 2, 3])
@pytest.mark.parametrize("every", [2, 3])
async def test_it_goes_on_where_it_stands(
    tmp_path: Path, redis: Redis, run: str, redis_url: str, every: int, kept: int, goes_back: bool
) -> None:
    newest = every * (kept + 1)  # step of the newest checkpoint; one more step is trained
    oldest, end = newest - every * (kept - 1), newest + every
    bank = BankProcess(tmp_path, run, redis_url)
    trainer = Trainer(tmp_path, redis, run, every, kept)
    router = Router(redis, run, await next_epoch(redis, run, "router"))
    mark = RunStreams(redis, run).key("mark")

    async def marked() -> bool:
        return await redis.hget(mark, "step") == str(oldest).encode()

    async def trained() -> bool:
        return driver.machine.step == newest + 1

    async def done() -> bool:
        return driver.machine.durable == end

    with _ended(bank):
        bank.start()
        async with trainer.running() as driver:
            for step in range(1, newest + 2):
                await router.group(f"g-{step}", scored(1.0), scored(0.0))
            await until(trained)
            await until(marked)
        assert bank.end(signal.SIGTERM) == 0
        bank.start()
        async with trainer.running(oldest if goes_back else None) as driver:
            for step in range(newest + 2, end + 1):
                await router.group(f"g-{step}", scored(1.0), scored(0.0))
            await until(done)
    assert trainer.trained_on(end) == list(range(1, end + 1))
