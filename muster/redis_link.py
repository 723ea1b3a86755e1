"""The link to a Redis server: connections, what is asked of the server, how its troubles are told.

Owns: the pool, the check on connecting, the mapping of failures. Promise: what passes by itself, or
once a person acts, is Unavailable with what it takes, and whoever repeats the call loses nothing;
a server that can never do is refused on connecting. Does not cover: how long a call is repeated
(each service's `redis_patience_s` or the like), what is written (streams.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import redis.exceptions as failures
from redis.asyncio import BlockingConnectionPool, Redis

from muster import durability, telemetry
from muster.clock import monotonic
from muster.config import RedisConfig
from muster.errors import ConfigError, Unavailable

_log = telemetry.logger("muster.redis")
_LOADING_S = 60.0  # about a second per 100 MB
_LOADING_POLL_S = 0.2

# A full server refuses a script before it begins, or runs it to its end: never a part of one. What
# leads to memory being freed (the bank's and the trainer's records, epochs) is let in all the same.
STRICT, RESERVE = "#!lua\n", "#!lua flags=allow-oom\n"


@asynccontextmanager
async def connect(config: RedisConfig, *, reading: bool = False) -> AsyncIterator[Redis]:
    """A checked client: reachable, a primary, and as durable as the configuration asks.

    `reading`: only reachable. Raises ConfigError, Unavailable.
    """
    if not config.url:
        raise ConfigError(
            "no Redis is configured",
            field="redis.url",
            way_out="name a server, or start everything with `muster up`, which brings its own",
        )
    try:
        pool = BlockingConnectionPool.from_url(
            config.url,
            max_connections=config.connections_max,
            timeout=config.timeout_s,
            socket_connect_timeout=config.timeout_s,
            socket_timeout=config.timeout_s,
        )
    except ValueError as error:
        raise ConfigError(
            "not the address of a Redis server",
            field="redis.url",
            value=_shown(config.url),
            way_out="write redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix://PATH",
        ) from error
    client = Redis(connection_pool=pool)
    try:
        await _check(client, config, reading)
        yield client
    finally:
        await client.aclose()
        await pool.aclose()


async def _check(client: Redis, config: RedisConfig, reading: bool) -> None:
    shown = _shown(config.url)
    try:
        facts = await _facts(client)
    except (failures.ConnectionError, failures.TimeoutError, OSError) as error:
        raise Unavailable(
            f"Redis cannot be reached ({error})",
            field="redis.url",
            value=shown,
            way_out="start it or correct the address; without redis.url `muster up` brings its own",
        ) from error
    if not reading:
        for line in durability.check_server(facts, config, shown):
            _log.warning("%s: %s", shown, line)


async def _facts(client: Redis) -> durability.ServerFacts:
    info = await _loaded(client)
    settings: Mapping[Any, Any] = {}
    try:
        settings = await client.config_get("appendfsync", "no-appendfsync-on-rewrite")
    except failures.ResponseError as error:  # a managed server, or a user without that right
        _log.info("CONFIG GET is denied: %s", error)
    return durability.ServerFacts(
        version=str(info.get("redis_version", "")),
        replica=info.get("role") == "slave",
        aof=bool(info.get("aof_enabled")),
        appendfsync=str(settings.get("appendfsync", "")),
        rewrite_without_fsync=settings.get("no-appendfsync-on-rewrite") == "yes",
        eviction=str(info.get("maxmemory_policy", "noeviction")),
    )


async def _loaded(client: Redis) -> Mapping[str, Any]:
    """What the server says of itself, once it has loaded its data: before, it does not know."""
    deadline = monotonic() + _LOADING_S
    while True:
        info: Mapping[str, Any] = await client.info()
        if not info.get("loading"):
            return info
        left = f"it says {info.get('loading_eta_seconds', '?')} s are left"
        if monotonic() >= deadline:
            raise Unavailable(
                f"Redis has been loading its data for {_LOADING_S:.0f} s; {left}",
                way_out="wait until it is done, then start again",
            )
        _log.info("Redis is loading its data; %s", left)
        await asyncio.sleep(_LOADING_POLL_S)


def _shown(url: str) -> str:
    """The address without its credentials: it stands in errors and logs."""
    scheme, slashes, rest = url.partition("://")
    head, query, _ = rest.partition("?")
    return f"{scheme}{slashes}{head.rpartition('@')[2]}{query and '?…'}"


class reaching_redis:
    """Turns what passes by itself (no connection, a full or loading server) into Unavailable."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, failures.RedisError) and (way_out := _way_out(error)):
            writes = way_out is not _WAIT
            problem = "Redis takes no writes" if writes else "Redis does not answer"
            raise Unavailable(f"{problem} ({error})", way_out=way_out) from error


_WAIT = "it is retried; see its log"
_FULL = "it is retried; free memory there, or raise its maxmemory (redis.maxmemory_bytes)"
_READONLY = "it is retried; make that server the primary again, or name the primary"
_DISK = "it is retried; its disk is full or broken: free space there, see its log"


def _way_out(error: failures.RedisError) -> str:
    """What it takes to make a failure pass; "" when it does not pass. Some lose their code."""
    said = str(error)
    if isinstance(error, failures.OutOfMemoryError) or said.startswith("OOM"):
        return _FULL
    if isinstance(error, failures.ReadOnlyError) or said.startswith("READONLY"):
        return _READONLY
    if said.startswith("MISCONF"):
        return _DISK
    passing = (failures.ConnectionError, failures.TimeoutError, failures.TryAgainError)
    if isinstance(error, passing) or said.startswith(("NOREPLICAS", "BUSY", "MASTERDOWN")):
        return _WAIT
    return ""
