"""The link to a Redis server: connections, what is asked of the server, how its troubles are told.

Owns: the pool, the check on connecting, the mapping of failures. Promise: what passes by itself, or
once a person acts, is Unavailable with what it takes, and whoever repeats the call loses nothing;
a server that can never do is refused on connecting; whoever counts on one process of the server
(ServerWatch) neither reads from nor writes to the next one. Does not cover: how long a call is
repeated (each service's `redis_patience_s` or the like), what is written (streams.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.exceptions as failures
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import parse_url

from muster import durability, telemetry
from muster.clock import monotonic
from muster.config import RedisConfig
from muster.errors import ConfigError, Unavailable
from muster.redis_connection import connection_options

_log = telemetry.logger("muster.redis")
_LOADING_S = 60.0  # about a second per 100 MB
_LOADING_POLL_S = 0.2
_ON_DISK_S = 2.5  # everysec: a second until the next fsync begins, one while it runs

# A full server refuses a script before it begins, or runs it to its end: never a part of one. What
# leads to memory being freed (the bank's and the trainer's records, epochs) is let in all the same.
STRICT, RESERVE = "#!lua\n", "#!lua flags=allow-oom\n"


def check_url(url: str) -> None:
    """Raise ConfigError when `url` is not the address of a Redis server; connects to nothing."""
    try:
        parse_url(url)
    except ValueError as error:
        raise _not_an_address(url) from error


def _not_an_address(url: str) -> ConfigError:
    return ConfigError(
        "not the address of a Redis server",
        field="redis.url",
        value=shown_url(url),
        way_out="write redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix://PATH",
    )


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
        options = connection_options(
            config.url,
            max_connections=config.connections_max,
            timeout=config.timeout_s,
            socket_connect_timeout=config.timeout_s,
            socket_timeout=config.timeout_s,
            redis_connect_func=ServerWatch().connected,
        )
    except ValueError as error:
        raise _not_an_address(config.url) from error
    pool = BlockingConnectionPool(**options)
    client = Redis(connection_pool=pool)
    try:
        await _check(client, config, reading)
        yield client
    finally:
        await client.aclose()
        await pool.aclose()


async def _check(client: Redis, config: RedisConfig, reading: bool) -> None:
    shown = shown_url(config.url)
    try:
        facts = await server_facts(client)
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


async def server_facts(client: Redis) -> durability.ServerFacts:
    """What the server says of itself, once it has loaded its data. Raises Unavailable."""
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


class _Restarted(failures.RedisError):
    """No failure of a connection: redis-py shall not try again."""


class ServerWatch:
    """The process of the server that its user counts on. No connection is made to another one.

    A server that was restarted may have lost what it acknowledged last. Whoever remembers that
    would build on it: from the restart on, each of its calls is Unavailable. `restarted` says so.
    """

    def __init__(self) -> None:
        self._counted_on, self.restarted = "", False

    @classmethod
    def of(cls, client: Redis) -> ServerWatch:
        """That of a client made by `connect`."""
        connected = client.connection_pool.connection_kwargs.get("redis_connect_func")
        watch = getattr(connected, "__self__", None)
        if not isinstance(watch, cls):
            raise AssertionError("only a client of muster.redis_link.connect watches its server")
        return watch

    async def count_on(self, client: Redis) -> None:
        """From now on it has to be the process that answers now. Raises Unavailable."""
        self.forget()
        info: Mapping[str, Any] = {}
        with reaching_redis():
            info = await client.info("server")
        self._counted_on = str(info["run_id"])

    def forget(self) -> None:
        """Any process will do."""
        self._counted_on, self.restarted = "", False

    async def connected(self, connection: Any) -> None:
        """What redis-py calls on each new connection, before anything else uses it."""
        await connection.on_connect()
        if not self._counted_on:
            return
        await connection.send_command("INFO", "server")
        found = re.search(rb"run_id:(\w+)", _bytes(await connection.read_response()))
        if found is None or found[1].decode() != self._counted_on:
            self.restarted = True
            raise _Restarted("it was restarted, and this process counts on what it may have lost")


def _bytes(answer: bytes | str) -> bytes:
    return answer.encode() if isinstance(answer, str) else answer


async def on_disk(client: Redis, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
    """What a script answers, once what it wrote is on disk, as far as the server can tell that.

    At most some seconds; then, or when the server has no such command, without that. Raises
    Unavailable; the script may have had its effect.
    """
    reply_s = client.connection_pool.connection_kwargs.get("socket_timeout") or 2 * _ON_DISK_S
    wait_ms = max(1, int(1000 * min(_ON_DISK_S, reply_s / 2)))
    answer: Any = None
    one: Any = client.client()  # the command is about the writes of its own connection
    with reaching_redis():
        async with one:
            answer = await one.register_script(script)(keys=keys, args=args)
            try:
                local, _ = await one.execute_command("WAITAOF", 1, 0, wait_ms)
                if not local:
                    _log.info("not known to be on disk after %d ms", wait_ms)
            except failures.ResponseError as error:  # an old server, no file, or no right to ask
                _log.info("cannot wait until it is on disk: %s", error)
    return answer


def shown_url(url: str) -> str:
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
    passing = (
        failures.ConnectionError,
        failures.TimeoutError,
        failures.TryAgainError,
        _Restarted,
    )
    if isinstance(error, passing) or said.startswith(("NOREPLICAS", "BUSY", "MASTERDOWN")):
        return _WAIT
    return ""
