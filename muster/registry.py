"""Who is there: services announce themselves in Redis and keep the entry alive.

Promise: an entry that nobody refreshes is no longer listed after `ttl_s`. Presence is liveness
only; nothing here makes a write safe (epochs do). Does not cover: health of a listed service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from muster import telemetry
from muster.clock import wall
from muster.tasks import end
from muster.types import Value

_log = telemetry.logger("muster.registry")
KINDS = ("router", "inference", "sandbox", "readybank", "trainer")


class Entry(Value, frozen=True):
    """One announced service."""

    kind: str
    id: str
    address: str
    info: dict[str, str] = {}
    beat_unix_s: float = 0.0


class Registry:
    """Announcements of one run."""

    def __init__(self, redis: Redis, run: str, *, beat_s: float = 1.0, ttl_s: float = 6.0):
        self._redis, self._key = redis, f"m:{{{run}}}:registry"
        self._beat_s, self._ttl_s = beat_s, ttl_s

    @asynccontextmanager
    async def announce(
        self, kind: str, id: str, address: str, info: dict[str, str] | None = None
    ) -> AsyncIterator[None]:
        """Listed while the block runs; survives restarts of Redis."""
        entry = Entry(kind, id, address, info or {})
        await self._write(entry)
        try:
            async with asyncio.TaskGroup() as tasks:
                beat = tasks.create_task(self._beat(entry), name=f"announce-{kind}-{id}")
                try:
                    yield
                finally:
                    await end(beat)
        finally:
            try:
                # A courtesy: without it the entry is no longer listed after `ttl_s`.
                async with asyncio.timeout(1.0):
                    await self._redis.hdel(self._key, f"{kind}/{id}")
            except (RedisError, TimeoutError) as error:
                _log.warning("could not withdraw %s/%s: %s", kind, id, error)

    async def _beat(self, entry: Entry) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self._write(entry)
            except RedisError as error:
                _log.warning("heartbeat of %s/%s failed: %s", entry.kind, entry.id, error)

    async def _write(self, entry: Entry) -> None:
        fresh = msgspec.structs.replace(entry, beat_unix_s=wall())
        await self._redis.hset(self._key, f"{entry.kind}/{entry.id}", msgspec.json.encode(fresh))

    async def list(self, kind: str) -> list[Entry]:
        """Live entries of a kind, ordered by id."""
        found = await self._redis.hgetall(self._key)
        entries = [msgspec.json.decode(value, type=Entry) for value in found.values()]
        now = wall()
        live = [e for e in entries if e.kind == kind and now - e.beat_unix_s <= self._ttl_s]
        return sorted(live, key=lambda e: e.id)
