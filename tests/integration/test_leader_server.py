"""The server of the streams is restarted under a leader, which may count on what was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.errors import Refused, Unavailable
from muster.leader import Leadership
from muster.streams import RunStreams, StreamEntry, connect
from tests.integration.leading import lead_while
from tests.integration.redis_own import OwnServer

LEADER = "m:{r}:leader:router"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[OwnServer]:
    made = OwnServer(tmp_path)
    await made.start()
    yield made
    await made.admin.aclose()
    made.kill()


class OverSoon(Exception):
    """What was to be seen has been seen."""


async def lead_through_a_restart(server: OwnServer, *, keeps_all: bool) -> Leadership:
    """A leader whose server was restarted, after some beats since; Refused when it has ended."""

    async def restart() -> None:
        await server.admin.delete(LEADER)
        await _beaten(server)  # it must not end without a reason
        server.kill()
        await server.start()
        if keeps_all:
            await server.admin.delete(LEADER)
            await _beaten(server)
            raise OverSoon

    async with connect(server.config) as client:
        # Long to live: the key must be gone because it was given up.
        leader = Leadership(client, "r", "router", beat_s=0.01, ttl_s=60.0, keeps_all=keeps_all)
        assert await leader.stand_by(asyncio.Event())
        try:
            await lead_while(leader, restart)
        except* OverSoon:
            pass
        return leader


async def _beaten(server: OwnServer) -> None:
    """Until a beat has come through."""
    while not await server.admin.exists(LEADER):  # noqa: ASYNC110 - of the server
        await asyncio.sleep(0.01)


async def test_a_leader_ends_when_its_server_may_have_lost_records(server: OwnServer) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await lead_through_a_restart(server, keeps_all=False)
    assert failed.group_contains(Refused, match="was restarted")
    assert not await server.admin.exists(LEADER)  # the next one need not wait


async def test_a_leader_goes_on_when_its_server_keeps_all(server: OwnServer) -> None:
    leader = await lead_through_a_restart(server, keeps_all=True)
    assert leader.epoch == 1


async def test_nothing_of_a_leader_reaches_the_restarted_server(server: OwnServer) -> None:
    """Not even before its next beat, which here never comes."""
    async with connect(server.config) as client:
        leader = Leadership(client, "r", "router", beat_s=600.0, keeps_all=False)
        assert await leader.stand_by(asyncio.Event())
        async with leader.lead() as epoch:
            streams = RunStreams(client, "r", role="router", epoch=epoch)
            assert await streams.append([StreamEntry("events", "s", "1", b"kept")]) == [True]
            server.kill()
            await server.start()
            for call in (
                lambda: streams.append([StreamEntry("events", "s", "2", b"built on it")]),
                lambda: streams.read_all("events"),
            ):
                with pytest.raises(Unavailable, match="restarted"):
                    await call()
    assert [f[b"d"] for _, f in await server.admin.xrange("m:{r}:events")] == [b"kept"]


async def test_whoever_leads_nothing_yet_takes_any_server(server: OwnServer) -> None:
    async with connect(server.config) as client:
        leader = Leadership(client, "r", "router", beat_s=0.01, keeps_all=False)
        assert await leader.stand_by(asyncio.Event())
        server.kill()
        await server.start()
        async with leader.lead() as epoch:
            assert epoch == 1
