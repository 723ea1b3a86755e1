"""Which weights a starting replica takes."""

from __future__ import annotations

from pathlib import Path

from redis.asyncio import Redis

from muster.config import Config
from muster.v1 import events_pb2 as ev
from services.inference.__main__ import _newest
from tests.versions import append_version


async def durable(redis: Redis, run: str, version: int, checkpoint: str) -> None:
    record = ev.PolicyVersionRecord(
        version=version, parent=version - 1, stage=ev.VERSION_STAGE_DURABLE, checkpoint=checkpoint
    )
    await append_version(redis, run, record)


async def test_a_checkpoint_that_was_set_aside_gives_way_to_the_one_before_it(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    for version, name in ((1, "one"), (2, "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
        await durable(redis, run, version, name)
    config = Config(run=run, state_dir=tmp_path)
    assert await _newest(redis, config) == (tmp_path / "two", 2)
    (tmp_path / "two").rename(tmp_path / "aside-two")
    assert await _newest(redis, config) == (tmp_path / "one", 1)
