"""How a trainer comes to be the one trainer of its run: the lock of its folder, its epoch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.errors import Unavailable
from muster.streams import connect
from muster.trainer_epoch import take_epoch
from services.trainer.__main__ import _take_over
from services.trainer.adapters.checkpoint import CheckpointStore
from services.trainer.config import TrainerConfig
from tests.integration import redis_own
from tests.integration.redis_own import OwnServer

PATIENT = TrainerConfig(retry_s=60, retry_first_s=0.01)


@pytest.fixture
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OwnServer]:
    # A short path: a Unix socket's may have 107 bytes.
    made = OwnServer(tmp_path_factory.mktemp("r"))
    await made.start()
    yield made
    await made.admin.aclose()
    made.kill()


def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", "r", 2)


async def test_a_full_server_gives_an_epoch(server: OwnServer) -> None:
    """The bank can only clear up what a trainer has acknowledged."""
    async with connect(server.config) as redis, redis_own.full(server):
        assert await take_epoch(redis, "r", 3) == 4


async def test_a_server_that_is_away_is_waited_for(
    server: OwnServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(server.config) as redis, asyncio.TaskGroup() as tasks:
        async with redis_own.away(server):
            taking = tasks.create_task(_take_over(redis, "r", PATIENT, store(tmp_path)))
            async with asyncio.timeout(20):
                while "Redis is away" not in caplog.text:  # noqa: ASYNC110 - nobody is told of it
                    await asyncio.sleep(0.01)
        assert await taking == 1
    assert (tmp_path / "checkpoints" / "epoch").read_text() == "1\n"


async def test_a_second_trainer_on_one_folder_fences_nobody(
    server: OwnServer, tmp_path: Path
) -> None:
    first = store(tmp_path)
    hasty = TrainerConfig(retry_s=0)
    async with connect(server.config) as redis:
        assert await _take_over(redis, "r", hasty, first) == 1
        with pytest.raises(Unavailable, match=r"another trainer, process \d+, has the checkpoints"):
            await _take_over(redis, "r", hasty, store(tmp_path))
        assert await take_epoch(redis, "r", 0) == 2  # so none was taken
