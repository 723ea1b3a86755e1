"""One socket, one question at a time: whoever waits, leaves or is late harms no other."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest

from services.sandbox.adapters.native import wire
from services.sandbox.adapters.native.channel import Channel, Late
from services.sandbox.box import BoxFailure


class Peer:
    """The other end, which answers when it is told to."""

    def __init__(self, end: socket.socket):
        self.end = end
        end.settimeout(10)

    async def asked(self) -> dict[str, object]:
        return (await asyncio.to_thread(wire.receive, self.end))[0]

    def answer(self, text: str) -> None:
        wire.send(self.end, {"text": text})


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Channel, Peer]]:
    own, theirs = socket.socketpair()
    channel = Channel(own)
    yield channel, Peer(theirs)
    channel.close()
    theirs.close()


async def text(channel: Channel, op: str, wait_s: float = 10) -> str:
    answer, _ = await channel.call({"op": op}, wait_s=wait_s)
    return str(answer["text"])


async def test_a_call_that_never_got_its_turn_leaves_the_channel_as_it_was(
    ends: tuple[Channel, Peer],
) -> None:
    channel, peer = ends
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(text(channel, "first"))
        assert (await peer.asked())["op"] == "first"
        with pytest.raises(BoxFailure, match="nothing was sent"):
            await text(channel, "second", wait_s=0.05)
        peer.answer("one")
        assert await first == "one"
        third = tasks.create_task(text(channel, "third"))
        assert (await peer.asked())["op"] == "third"
        peer.answer("three")
    assert third.result() == "three"


async def test_an_answer_that_is_late_closes_the_channel(ends: tuple[Channel, Peer]) -> None:
    channel, _ = ends
    with pytest.raises(Late, match="no answer to 'x'"):
        await text(channel, "x", wait_s=0.05)
    with pytest.raises(BoxFailure, match="closed"):
        await text(channel, "y")


async def test_the_answer_to_a_caller_that_left_is_dropped(ends: tuple[Channel, Peer]) -> None:
    channel, peer = ends
    async with asyncio.TaskGroup() as tasks:
        left = tasks.create_task(text(channel, "left"))
        await peer.asked()
        left.cancel()
        stays = tasks.create_task(text(channel, "stays"))
        await peer.asked()
        peer.answer("for the one that left")
        peer.answer("for the one that stays")
    assert stays.result() == "for the one that stays"


async def test_closing_wakes_a_call_in_flight(ends: tuple[Channel, Peer]) -> None:
    channel, peer = ends
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:

        async def call() -> None:
            with pytest.raises(BoxFailure):
                await text(channel, "x", wait_s=60)

        tasks.create_task(call())
        await peer.asked()
        channel.close()


async def test_what_is_mentioned_needs_no_answer_and_waits_for_no_call(
    ends: tuple[Channel, Peer],
) -> None:
    channel, peer = ends
    assert channel.mention({"op": "beat"})
    assert (await peer.asked())["op"] == "beat"
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(text(channel, "call"))
        assert (await peer.asked())["op"] == "call"
        assert channel.mention({"op": "beat"})  # left out: a call shows as much
        peer.answer("one")
        assert await call == "one"
        assert channel.mention({"op": "last"})
        assert (await peer.asked())["op"] == "last"


async def test_a_peer_that_has_gone_cannot_be_mentioned_to(ends: tuple[Channel, Peer]) -> None:
    channel, peer = ends
    peer.end.close()
    assert not channel.mention({"op": "beat"})


async def test_a_caller_that_slept_past_its_limit_does_not_call_a_gone_peer_late(
    ends: tuple[Channel, Peer],
) -> None:
    channel, peer = ends
    async with asyncio.TaskGroup() as tasks:

        async def call() -> None:
            with pytest.raises(BoxFailure, match="gone") as caught:
                await text(channel, "x", wait_s=0.05)
            assert not isinstance(caught.value, Late)

        tasks.create_task(call())
        await peer.asked()
        peer.end.close()
        time.sleep(0.1)  # noqa: ASYNC251 - as a process that is stopped does
