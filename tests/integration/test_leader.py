"""Who leads: one at a time, each under an epoch of its own, whatever Redis has lost."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial

import pytest
from redis.asyncio import Redis

from muster.errors import Fenced
from muster.leader import Leadership, bury
from muster.streams import next_epoch
from tests.integration.leading import lead_while

BEAT_S = 0.02


def contender(redis: Redis, run: str, ttl_s: float = 60.0) -> Leadership:
    return Leadership(redis, run, "router", beat_s=BEAT_S, ttl_s=ttl_s)


async def ready(redis: Redis, run: str) -> Leadership:
    """One that may lead."""
    made = contender(redis, run)
    async with asyncio.timeout(10):
        assert await made.stand_by(asyncio.Event())
    return made


async def stands_by(other: Leadership) -> None:
    while not other.stood_by:  # noqa: ASYNC110 - a process tells it in its log alone
        await asyncio.sleep(BEAT_S)


async def test_the_next_one_leads_as_soon_as_the_first_resigns(redis: Redis, run: str) -> None:
    """Its heartbeat would last a minute."""
    first, second = await ready(redis, run), contender(redis, run)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        async with first.lead():
            waiting = tasks.create_task(second.stand_by(asyncio.Event()))
            await stands_by(second)
        assert await waiting
    async with second.lead() as epoch:
        assert epoch == first.epoch + 1


async def test_one_that_is_asked_to_stop_while_it_waits_takes_no_epoch(
    redis: Redis, run: str
) -> None:
    first, second, stopping = await ready(redis, run), contender(redis, run), asyncio.Event()
    async with first.lead(), asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(second.stand_by(stopping))
        await stands_by(second)
        stopping.set()
    assert waiting.result() is False
    assert second.epoch == 0


async def test_a_leader_learns_of_a_newer_one(redis: Redis, run: str) -> None:
    leader = await ready(redis, run)
    with pytest.raises(ExceptionGroup) as failed:
        await lead_while(leader, lambda: next_epoch(redis, run, "router"))
    assert failed.group_contains(Fenced, match="a newer router leads")


async def test_an_epoch_that_a_power_cut_took_back_ends_its_leader_and_is_not_given_again(
    redis: Redis, run: str
) -> None:
    """Replicas and hosts have seen the first leader's epoch, and refuse every older one."""
    for lost in range(3):
        leader = await ready(redis, run)
        with pytest.raises(ExceptionGroup) as failed:
            await lead_while(leader, partial(redis.set, f"m:{{{run}}}:epoch:router", lost))
        assert failed.group_contains(Fenced)
    async with (await ready(redis, run)).lead() as epoch:
        assert epoch == 4


async def test_a_leader_ends_when_another_has_taken_its_place(redis: Redis, run: str) -> None:
    """It was silent for too long; the other has not taken its epoch yet."""
    leader, key = await ready(redis, run), f"m:{{{run}}}:leader:router"
    with pytest.raises(ExceptionGroup) as failed:
        await lead_while(leader, lambda: redis.set(key, "another", px=60_000))
    assert failed.group_contains(Fenced, match="a newer router leads")
    assert await redis.get(key) == b"another"


async def test_an_epoch_is_on_disk_before_it_is_used(redis: Redis, run: str) -> None:
    seen: list[str] = []
    async with asyncio.timeout(10), redis.monitor() as told:
        await next_epoch(redis, run, "router")
        while "WAITAOF" not in seen:
            seen.append((await told.next_command())["command"].partition(" ")[0].upper())
    assert "INCR" in seen  # the wait is for what was written before it


async def test_whoever_may_not_wait_for_the_disk_leads_all_the_same(
    redis: Redis, redis_url: str, run: str
) -> None:
    rules = ("reset", "on", "nopass", "~*", "+@all", "-waitaof")
    await redis.execute_command("ACL", "SETUSER", "limited", *rules)  # type: ignore[no-untyped-call]
    limited = Redis(unix_socket_path=redis_url.removeprefix("unix://"), username="limited")
    assert await next_epoch(limited, run, "router") == 1
    await limited.aclose()


async def test_one_that_is_known_to_be_dead_is_not_waited_for(redis: Redis, run: str) -> None:
    """Told by whoever saw it die, and of nobody else."""
    await ready(redis, run)
    host, pid = socket.gethostname(), os.getpid()
    assert not await bury(redis, run, "router", host="elsewhere", pid=pid)
    assert not await bury(redis, run, "router", host=host, pid=pid + 1)
    assert await bury(redis, run, "router", host=host, pid=pid)
    assert (await ready(redis, run)).stood_by is False


async def test_a_dead_leader_is_waited_for_no_longer_than_a_heartbeat_lasts(
    redis: Redis, run: str
) -> None:
    """The server's clock went back by an hour since its last one."""
    await redis.set(f"m:{{{run}}}:leader:router", "dead", px=3_600_000)
    other = contender(redis, run, ttl_s=0.1)
    async with asyncio.timeout(10):
        assert await other.stand_by(asyncio.Event())
    assert other.stood_by
