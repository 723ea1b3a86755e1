"""A bank that starts while the server of the streams is restarted waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from muster.config import load_config
from muster.journal import Journal
from muster.registry import Registry
from muster.streams import Received, RunStreams, next_epoch
from services.readybank.adapters.clearing import Clearing
from services.readybank.adapters.scoring import Scorer
from services.readybank.config import ReadyBankConfig, rules
from services.readybank.driver import BankDriver
from services.readybank.machine import BankMachine


class Restarting:
    """A connection whose first reads of a key fail."""

    def __init__(self, redis: Redis, failures: int):
        self._redis, self._left = redis, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    async def get(self, key: str) -> Any:
        if self._left:
            self._left -= 1
            raise ConnectionError("Connection lost")
        return await self._redis.get(key)


async def nowhere(entries: list[Received]) -> None:
    """Nothing is over in these stories."""
    raise AssertionError(entries)


async def test_the_trainers_epoch_is_asked_for_until_the_server_is_back(
    tmp_path: Path, redis: Redis, run: str
) -> None:
    epoch = await next_epoch(redis, run, "readybank")
    assert await next_epoch(redis, run, "trainer") == 1
    streams = RunStreams(redis, run, role="readybank", epoch=epoch)
    section = ReadyBankConfig()
    machine = BankMachine(rules(load_config(None, {}), section))
    server: Any = Restarting(redis, failures=2)
    clearing = Clearing(server, streams, nowhere, machine.retiring.gone, epoch=epoch)
    journal, stopping = Journal(tmp_path / "j.jsonl", "readybank", machine.rules), asyncio.Event()
    driver = BankDriver(
        streams, section, machine, journal, clearing, Scorer(streams, Registry(redis, run), 1.0)
    )
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run(stopping))
        await driver.recover()
        stopping.set()
    journal.close()
    assert machine.leases.epoch == 1
