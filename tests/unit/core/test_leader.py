"""One leads, others stand by, a dead one is buried, a former one is told."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest
from redis.asyncio import Redis

from muster.errors import Fenced
from muster.leader import Leadership, bury
from muster.streams import next_epoch

NEVER = asyncio.Event


def contender(valkey: Redis, *, ttl_s: float = 60.0) -> Leadership:
    return Leadership(valkey, "r", "router", beat_s=0.01, ttl_s=ttl_s)


async def test_the_first_leads_at_once_and_the_second_when_it_resigns(valkey: Redis) -> None:
    first, second = contender(valkey), contender(valkey)
    assert await first.stand_by(NEVER())
    async with asyncio.TaskGroup() as tasks:
        async with first.lead() as epoch:
            waiting = tasks.create_task(second.stand_by(NEVER()))
            assert (epoch, waiting.done()) == (1, False)
        assert await waiting
    async with second.lead() as epoch:
        assert epoch == 2


async def test_who_stands_by_can_be_stopped(valkey: Redis) -> None:
    first, second, stopping = contender(valkey), contender(valkey), asyncio.Event()
    await first.stand_by(NEVER())
    stopping.set()
    assert await second.stand_by(stopping) is False


async def test_a_former_leader_is_told_within_a_beat(valkey: Redis) -> None:
    leader = contender(valkey)
    await leader.stand_by(NEVER())

    async def lead() -> None:
        async with leader.lead():
            await next_epoch(valkey, "r", "router")
            await asyncio.Event().wait()

    with pytest.raises(BaseExceptionGroup) as caught:
        await lead()
    assert caught.group_contains(Fenced)


async def test_a_dead_leader_is_buried_and_its_standby_need_not_wait(valkey: Redis) -> None:
    dead, standby = contender(valkey), contender(valkey)
    await dead.stand_by(NEVER())
    host, pid = socket.gethostname(), os.getpid()
    assert await bury(valkey, "r", "router", host=host, pid=pid + 1) is False
    assert await bury(valkey, "r", "router", host="elsewhere", pid=pid) is False
    assert await bury(valkey, "r", "router", host=host, pid=pid) is True
    async with asyncio.timeout(10):
        assert await standby.stand_by(NEVER())


STUCK = """
import asyncio, sys
from redis.asyncio import Redis
from muster.leader import Leadership
from muster.streams import next_epoch

async def main():
    redis = Redis(unix_socket_path=sys.argv[1])
    leadership = Leadership(redis, "r", "router", beat_s=0.01, end_s=0.1)
    await leadership.stand_by(asyncio.Event())
    async with leadership.lead():
        await next_epoch(redis, "r", "router")
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass

asyncio.run(main())
"""


async def test_a_former_leader_that_hangs_is_ended(valkey_socket: object) -> None:
    command = [sys.executable, "-c", STUCK, str(valkey_socket)]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("router: epoch of router = '1': a newer router")
