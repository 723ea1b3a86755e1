"""Version records in the streams of a run, written by nobody's epoch."""

from __future__ import annotations

from redis.asyncio import Redis

from muster.streams import RunStreams, StreamEntry
from muster.v1 import events_pb2 as ev


async def append_version(client: Redis, run: str, record: ev.PolicyVersionRecord) -> None:
    """Equal (version, stage) pairs are written once."""
    dedupe = f"{record.version}/{record.stage}"
    entry = StreamEntry("versions", "versions", dedupe, record.SerializeToString())
    await RunStreams(client, run).append([entry])
