"""Who is there, as long as it says so."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from muster.clock import wall
from muster.errors import Unavailable
from muster.registry import Entry, Registry

KEY = "m:{r}:registry"


async def test_an_announced_service_is_listed_while_it_lives(valkey: Redis) -> None:
    registry = Registry(valkey, "r")
    async with registry.announce("inference", "e1", "h:2", {"gpu": "0"}):
        async with registry.announce("inference", "e0", "h:1"):
            async with registry.announce("sandbox", "s0", "h:3"):
                found = await registry.list("inference")
                assert [(e.id, e.address, e.info) for e in found] == [
                    ("e0", "h:1", {}),
                    ("e1", "h:2", {"gpu": "0"}),
                ]
        assert [e.id for e in await registry.list("inference")] == ["e1"]
    assert await registry.list("inference") == []
    assert await valkey.hlen(KEY) == 0


async def test_an_entry_that_nobody_refreshes_is_not_listed(valkey: Redis) -> None:
    registry = Registry(valkey, "r", ttl_s=6)
    async with registry.announce("router", "r0", "h:1"):
        stale = msgspec.structs.replace((await registry.list("router"))[0], beat_unix_s=1.0)
        await valkey.hset(KEY, "router/r1", msgspec.json.encode(stale))
        assert [e.id for e in await registry.list("router")] == ["r0"]


async def test_an_entry_comes_back_after_the_server_lost_it(valkey: Redis) -> None:
    registry = Registry(valkey, "r", beat_s=0.001)
    async with registry.announce("router", "r0", "h:1"):
        await valkey.flushall()
        async with asyncio.timeout(10):
            while not await registry.list("router"):
                pass
        assert [e.address for e in await registry.list("router")] == ["h:1"]


class Restarting:
    """A server that refuses its first calls."""

    def __init__(self, redis: Redis, refusals: int):
        self._redis, self._left = redis, refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    async def time(self) -> Any:
        if self._left:
            self._left -= 1
            raise ConnectionError("Connection closed by server.")
        return await self._redis.time()


async def test_who_starts_while_the_server_restarts_is_announced_later(valkey: Redis) -> None:
    server: Any = Restarting(valkey, refusals=3)
    async with Registry(server, "r", beat_s=0.001).announce("router", "r0", "h:1"):
        assert [e.id for e in await Registry(valkey, "r").list("router")] == ["r0"]


async def test_a_server_that_stays_away_is_told_by_name(valkey: Redis) -> None:
    server: Any = Restarting(valkey, refusals=10_000)
    with pytest.raises(Unavailable):
        async with Registry(server, "r", patience_s=0.0).announce("router", "r0", "h:1"):
            pass


async def test_an_entry_that_nobody_can_read_hides_no_other(valkey: Redis) -> None:
    await valkey.hset(KEY, "router/r9", b"\xff{")
    registry = Registry(valkey, "r")
    async with registry.announce("router", "r0", "h:1"):
        assert [e.id for e in await registry.list("router")] == ["r0"]


async def test_runs_do_not_see_each_other(valkey: Redis) -> None:
    async with Registry(valkey, "r").announce("router", "r0", "h:1"):
        assert await Registry(valkey, "other").list("router") == []


async def test_a_failure_inside_the_block_withdraws_the_entry(valkey: Redis) -> None:
    registry = Registry(valkey, "r")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with registry.announce("router", "r0", "h:1"):
            raise LookupError("boom")
    assert caught.group_contains(LookupError)
    assert await registry.list("router") == []


def test_an_entry_needs_only_who_and_where() -> None:
    assert Entry("router", "r0", "h:1").info == {}


async def test_the_newest_owner_is_listed_last(valkey: Redis) -> None:
    registry = Registry(valkey, "r")
    async with registry.announce("router", "router-10", "h:2"):
        async with registry.announce("router", "router-9", "h:1"):
            assert [e.id for e in await registry.list("router")] == ["router-9", "router-10"]


async def test_an_entry_says_which_process_it_is(valkey: Redis) -> None:
    async with Registry(valkey, "r").announce("standby", "router-x", ""):
        [entry] = await Registry(valkey, "r").list("standby")
    assert (entry.pid, entry.host) == (os.getpid(), socket.gethostname())


async def test_what_killed_processes_left_long_ago_is_removed(valkey: Redis) -> None:
    registry = Registry(valkey, "r", ttl_s=6)
    async with registry.announce("router", "r0", "h:1"):
        [entry] = await registry.list("router")
        for age in (10.0, 10_000.0):
            old = msgspec.structs.replace(entry, id=f"r-{age}", beat_unix_s=wall() - age)
            await valkey.hset(KEY, f"router/{old.id}", msgspec.json.encode(old))
        async with registry.announce("sandbox", "s0", "h:2"):
            kept = {field.decode() for field in await valkey.hkeys(KEY)}
    assert kept == {"router/r0", "router/r-10.0", "sandbox/s0"}


async def test_a_full_server_takes_heartbeats(valkey: Redis) -> None:
    await valkey.config_set("maxmemory", "1")
    async with Registry(valkey, "r").announce("router", "r0", "h:1"):
        assert [e.id for e in await Registry(valkey, "r").list("router")] == ["r0"]
    await valkey.config_set("maxmemory", "0")


async def test_of_two_processes_of_one_id_the_later_one_counts(valkey: Redis) -> None:
    registry = Registry(valkey, "r", beat_s=0.001)
    async with registry.announce("sandbox", "s0", "h:1"):
        async with registry.announce("sandbox", "s0", "h:2"):
            beaten = (await registry.list("sandbox"))[0].beat_unix_s
            async with asyncio.timeout(10):
                while (found := (await registry.list("sandbox"))[0]).beat_unix_s == beaten:
                    pass
            assert (found.address, found.incarnation) == ("h:2", 2)


async def test_who_was_followed_withdraws_nothing(valkey: Redis) -> None:
    registry = Registry(valkey, "r", beat_s=1000.0)
    former = registry.announce("sandbox", "s0", "h:1")
    await former.__aenter__()
    async with registry.announce("sandbox", "s0", "h:2"):
        await former.__aexit__(None, None, None)
        assert [e.address for e in await registry.list("sandbox")] == ["h:2"]
    assert await registry.list("sandbox") == []


async def test_an_entry_that_nobody_can_read_is_followed(valkey: Redis) -> None:
    await valkey.hset(KEY, "sandbox/s0", b"\xff{")
    registry = Registry(valkey, "r")
    async with registry.announce("sandbox", "s0", "h:1"):
        assert [e.incarnation for e in await registry.list("sandbox")] == [1]
