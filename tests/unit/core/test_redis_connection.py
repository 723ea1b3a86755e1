"""A task that is cancelled in a call to Redis ends, and no later call gets the answer to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Connection, Redis, SSLConnection

from muster.config import RedisConfig
from muster.redis_connection import client_at, connection_options
from muster.redis_link import connect

_OFFSETS = range(40)


async def _cancelled_at_every_step(client: Redis) -> None:
    """A loop of calls, cancelled so many turns of the event loop after its begin."""

    async def calls() -> None:
        while True:
            await client.blpop(["nothing"], timeout=0.02)  # the answer comes later

    for steps in _OFFSETS:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(calls(), name="calls")
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task}, timeout=5)
            assert task.cancelled(), f"cancelled after {steps} turns of the loop, it went on"
        assert await client.echo(str(steps)) == str(steps).encode()


async def test_a_loop_of_calls_ends_wherever_it_is_cancelled(valkey_socket: Path) -> None:
    client = client_at(f"unix://{valkey_socket}", max_connections=2, socket_timeout=5)
    async with client:
        await _cancelled_at_every_step(client)


async def test_so_it_does_with_the_client_of_the_services(valkey_socket: Path) -> None:
    config = RedisConfig(url=f"unix://{valkey_socket}", connections_max=2, timeout_s=5)
    async with connect(config, reading=True) as client:
        await _cancelled_at_every_step(client)


async def test_a_limit_around_a_call_is_kept(valkey_socket: Path) -> None:
    """`asyncio.timeout` cancels, too, and is not to take the lost one for success."""
    async with client_at(f"unix://{valkey_socket}", socket_timeout=5) as client:
        await client.ping()
        late = asyncio.timeout(0)
        with pytest.raises(TimeoutError):
            await _pings(client, late)


async def test_what_a_cancelled_task_tidies_up_it_may_still_write(valkey_socket: Path) -> None:
    async with client_at(f"unix://{valkey_socket}", socket_timeout=5) as client:

        async def tidies() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await client.set("tidied", "yes")

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(tidies(), name="tidies")
            await asyncio.sleep(0)
            task.cancel()
        assert task.cancelled()
        assert await client.getdel("tidied") == b"yes"


async def _pings(client: Redis, limit: asyncio.Timeout) -> None:
    async with limit:
        for _ in range(100):
            await client.ping()


@pytest.mark.parametrize(
    ("url", "kind"), [("redis://h:1/2", Connection), ("rediss://h:1/2", SSLConnection)]
)
def test_every_kind_of_address_keeps_its_kind_of_connection(url: str, kind: type) -> None:
    options = connection_options(url)
    assert issubclass(options["connection_class"], kind)
    assert (options["host"], options["port"], options["db"]) == ("h", 1, 2)


def test_what_an_address_says_goes_before_what_is_set_beside_it() -> None:
    given = {"socket_timeout": 5.0, "max_connections": 4}
    options = connection_options("redis://h:1/0?socket_timeout=3", **given)
    assert (options["socket_timeout"], options["max_connections"]) == (3.0, 4)
