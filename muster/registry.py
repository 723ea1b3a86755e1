"""Who is there: services announce themselves in Redis and keep the entry alive.

Promise: an entry that nobody refreshes is no longer listed after `ttl_s`, and is removed by the
next that announces itself much later; a full server takes heartbeats all the same. Of two processes
of one id the one that came last counts: the other's heartbeats and its withdrawal change nothing.
Presence is liveness only; nothing here makes a write safe (epochs do). Does not cover: health of a
listed service. A process that stands by is listed under kind `standby` as ROLE-…, without address.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from muster import telemetry
from muster.clock import monotonic, wall
from muster.errors import Unavailable
from muster.redis_link import RESERVE, reaching_redis
from muster.tasks import end
from muster.types import Value

_log = telemetry.logger("muster.registry")
KINDS = ("router", "inference", "sandbox", "readybank", "trainer", "standby")
Info = dict[str, str] | Callable[[], dict[str, str]]
_FORGET = 100  # times `ttl_s`: no clock jumps that far and back

# KEYS: registry. ARGV: field, entry, incarnation. Answers the incarnation that counts: its own, a
# later one's, or, for 0, the next free one. What no release of ours can read is overwritten.
# Allowed to write without memory: the fleet would vanish while the server is full.
_WRITE = (
    RESERVE
    + """
local known, mine = 0, tonumber(ARGV[3])
local read, kept = pcall(cjson.decode, redis.call("HGET", KEYS[1], ARGV[1]) or "{}")
if read and type(kept) == "table" then known = tonumber(kept.incarnation) or 0 end
if mine == 0 then return known + 1 end
if known <= mine then redis.call("HSET", KEYS[1], ARGV[1], ARGV[2]) end
return math.max(known, mine)
"""
)
# KEYS: registry. ARGV: field, incarnation.
_WITHDRAW = (
    RESERVE
    + """
local read, kept = pcall(cjson.decode, redis.call("HGET", KEYS[1], ARGV[1]) or "{}")
if read and type(kept) == "table" and (tonumber(kept.incarnation) or 0) > tonumber(ARGV[2]) then
  return 0
end
return redis.call("HDEL", KEYS[1], ARGV[1])
"""
)


class Entry(Value, frozen=True):
    """One announced service; `host` and `pid` say which process it is.

    incarnation: grows with each process that announces itself under this kind and id. version: of
    Muster there. clock_unix_s: that machine's clock at the heartbeat, beat_unix_s the server's.
    """

    kind: str
    id: str
    address: str
    info: dict[str, str] = {}
    beat_unix_s: float = 0.0
    host: str = ""
    pid: int = 0
    incarnation: int = 0
    version: str = ""
    clock_unix_s: float = 0.0


class Registry:
    """Announcements of one run."""

    def __init__(
        self,
        redis: Redis,
        run: str,
        *,
        beat_s: float = 1.0,
        ttl_s: float = 6.0,
        patience_s: float = 30.0,
    ):
        """`patience_s`: how long the first announcement is repeated while Redis is away."""
        self._redis, self._key = redis, f"m:{{{run}}}:registry"
        self._patience_s = patience_s
        self._beat_s, self._ttl_s = beat_s, ttl_s
        self._set = redis.register_script(_WRITE)
        self._withdraw = redis.register_script(_WITHDRAW)

    @asynccontextmanager
    async def announce(
        self, kind: str, id: str, address: str, info: Info | None = None
    ) -> AsyncIterator[None]:
        """Listed while the block runs; survives restarts of Redis. Raises Unavailable.

        info: what else to tell; a function is asked again at each heartbeat.
        """
        told = info if callable(info) else lambda: info or {}
        entry = Entry(
            kind, id, address, told(), host=socket.gethostname(), pid=os.getpid(), version=release()
        )
        entry = await self._begin(entry)
        try:
            async with asyncio.TaskGroup() as tasks:
                beat = tasks.create_task(self._beat(entry, told), name=f"announce-{kind}-{id}")
                try:
                    yield
                finally:
                    await end(beat)
        finally:
            try:
                # A courtesy: without it the entry is no longer listed after `ttl_s`.
                async with asyncio.timeout(1.0):
                    await self._withdraw(keys=[self._key], args=[_name(entry), entry.incarnation])
            except (RedisError, TimeoutError) as error:
                _log.warning("could not withdraw %s/%s: %s", kind, id, error)

    async def _begin(self, entry: Entry) -> Entry:
        """Who starts while Redis is restarted has nothing to end for."""
        until = monotonic() + self._patience_s
        while True:
            try:
                with reaching_redis():
                    await self._forget()
                    number = int(await self._set(keys=[self._key], args=[_name(entry), "", 0]))
                    entry = msgspec.structs.replace(entry, incarnation=number)
                    await self._write(entry)
                return entry
            except Unavailable as error:
                if monotonic() >= until:
                    raise
                _log.warning("%s/%s is not announced yet: %s", entry.kind, entry.id, error)
            await asyncio.sleep(self._beat_s)

    async def _beat(self, entry: Entry, told: Callable[[], dict[str, str]]) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                if not await self._write(msgspec.structs.replace(entry, info=told())):
                    _log.warning("%s is announced by a later process", _name(entry))
            except RedisError as error:
                _log.warning("heartbeat of %s failed: %s", _name(entry), error)

    async def _write(self, entry: Entry) -> bool:
        """False when a later process of this id has announced itself."""
        now = await self._now()
        fresh = msgspec.structs.replace(entry, beat_unix_s=now, clock_unix_s=wall())
        data = msgspec.json.encode(fresh)
        args = (_name(entry), data, entry.incarnation)
        return int(await self._set(keys=[self._key], args=args)) == entry.incarnation

    async def _forget(self) -> None:
        """Remove what killed processes left long ago."""
        oldest = await self._now() - _FORGET * self._ttl_s
        old = [_name(e) for e in await self._all() if e.beat_unix_s < oldest]
        if old:
            await self._redis.hdel(self._key, *old)

    async def list(self, kind: str) -> list[Entry]:
        """Live entries of a kind, ordered by id: numbers in it count as numbers."""
        now = await self._now()
        found = await self._all()
        live = [e for e in found if e.kind == kind and now - e.beat_unix_s <= self._ttl_s]
        return sorted(live, key=lambda e: _natural(e.id))

    async def _now(self) -> float:
        """The server's clock: those of writers and readers may differ by more than a lifetime."""
        seconds, microseconds = await self._redis.time()
        return float(seconds) + microseconds / 1e6

    async def _all(self) -> builtins.list[Entry]:
        found = await self._redis.hgetall(self._key)
        read = (_entry(value) for value in found.values())
        return [entry for entry in read if entry is not None]


def release() -> str:
    """Version of Muster that is installed here; "" where it is not installed."""
    try:
        return installed("muster-rl")
    except PackageNotFoundError:
        return ""


def _name(entry: Entry) -> str:
    return f"{entry.kind}/{entry.id}"


def _entry(value: bytes | str) -> Entry | None:
    """None for what this release cannot read: it is as if it were not announced."""
    try:
        return msgspec.json.decode(value, type=Entry)
    except msgspec.DecodeError:
        return None


def _natural(id: str) -> list[tuple[bool, int, str]]:
    """`router-10` comes after `router-9`: the last one listed is the newest owner."""
    parts = re.findall(r"[0-9]+|[^0-9]+", id)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
