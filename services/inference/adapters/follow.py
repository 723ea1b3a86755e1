"""A fake engine without a transfer takes the versions that the run records. For tests of others.

Promise: serves the newest version that was recorded as published, a moment after the record.
Does not cover: weights; with a real trainer they come through PrepareWeightUpdate alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from redis.asyncio import Redis

from muster.errors import Unavailable
from muster.streams import Received, RunStreams, version_record
from muster.v1 import events_pb2 as ev

_STREAM = "versions"
_AWAY_S = 0.5


async def catch_up(redis: Redis, run: str, serve: Callable[[int], None]) -> str:
    """Calls `serve` with the version published last, if any; the id to follow from."""
    return _newest(await RunStreams(redis, run).read_all(_STREAM), "0-0", serve)


async def follow(redis: Redis, run: str, after: str, serve: Callable[[int], None]) -> None:
    """Calls `serve` with the versions that are published from now on; until cancelled."""
    streams = RunStreams(redis, run)
    while True:
        try:
            after = _newest(await streams.tail({_STREAM: after}), after, serve)
        except Unavailable:
            await asyncio.sleep(_AWAY_S)  # Redis restarts


def _newest(messages: list[Received], after: str, serve: Callable[[int], None]) -> str:
    records = [version_record(message) for message in messages]
    published = [r.version for r in records if r and r.stage == ev.VERSION_STAGE_PUBLISHED]
    if published:
        serve(published[-1])
    return messages[-1].id if messages else after
