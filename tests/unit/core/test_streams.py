"""Streams on a real server: whole or not at all, once, by the present owner only."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from muster.config import RedisConfig
from muster.errors import ConfigError, Fenced, Unavailable
from muster.streams import (
    RunStreams,
    StreamEntry,
    connect,
    latest_version,
    next_epoch,
)
from muster.v1 import events_pb2 as ev
from tests.versions import append_version

ServerAt = Callable[..., Any]


def entry(dedupe: str, data: bytes = b"x", stream: str = "events", **more: Any) -> StreamEntry:
    return StreamEntry(stream, more.pop("scope", "s"), dedupe, data, **more)


async def test_entries_come_back_in_order_with_growing_ids(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    assert await streams.append([entry("1", b"a"), entry("2", b"b")]) == [True, True]
    assert await streams.append([entry("3", b"c", "fates")]) == [True]
    found = await streams.read_all("events")
    assert [m.data for m in found] == [b"a", b"b"]
    assert [m.data for m in await streams.read_all("fates")] == [b"c"]
    assert len({m.id for m in found}) == 2


async def test_data_may_be_any_bytes(valkey: Redis) -> None:
    streams, data = RunStreams(valkey, "r"), bytes(range(256))
    await streams.append([entry("1", data)], {"p": data})
    assert (await streams.read_all("events"))[0].data == data
    assert await streams.payloads(["p", "none"]) == [data, None]
    assert await streams.payloads([]) == []


async def test_an_entry_seen_before_is_skipped_and_its_neighbours_are_not(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await streams.append([entry("1", b"first")])
    assert await streams.append([entry("1", b"again"), entry("2", b"new")]) == [False, True]
    assert [m.data for m in await streams.read_all("events")] == [b"first", b"new"]


async def test_a_payload_stays_that_of_the_entry_it_came_with(valkey: Redis) -> None:
    """Another one, under an epoch that was given twice, would be trained on under its record."""
    streams = RunStreams(valkey, "r")
    await streams.append([entry("1")], {"p": b"sampled"})
    assert await streams.append([entry("1")], {"p": b"sampled again", "q": b"x"}) == [False]
    assert await streams.payloads(["p", "q"]) == [b"sampled", None]


async def test_an_entry_doubled_within_one_call_is_written_once(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    assert await streams.append([entry("1"), entry("1")]) == [True, False]


async def test_dedupe_is_per_scope_and_per_run(valkey: Redis) -> None:
    one, two = RunStreams(valkey, "one"), RunStreams(valkey, "two")
    assert await one.append([entry("1", scope="a"), entry("1", scope="b")]) == [True, True]
    assert await two.append([entry("1", scope="a")]) == [True]


async def test_a_former_owner_writes_nothing(valkey: Redis) -> None:
    old = RunStreams(valkey, "r", role="router", epoch=await next_epoch(valkey, "r", "router"))
    await old.append([entry("1")])
    new = RunStreams(valkey, "r", role="router", epoch=await next_epoch(valkey, "r", "router"))
    with pytest.raises(Fenced) as caught:
        await old.append([entry("2"), entry("3", stream="outcomes")], {"p": b"x"})
    assert (caught.value.field, caught.value.value) == ("epoch of router", "1")
    assert "epoch 2" in caught.value.way_out
    assert len(await new.read_all("events")) == 1
    assert await new.read_all("outcomes") == []
    assert await new.payloads(["p"]) == [None]
    assert await valkey.get("m:{r}:epoch:router:fenced") == b"1"
    assert await new.append([entry("2")]) == [True]  # the refused call left no dedupe mark


async def test_an_owner_is_fenced_when_the_server_has_forgotten_its_epoch(valkey: Redis) -> None:
    owner = RunStreams(valkey, "r", role="router", epoch=await next_epoch(valkey, "r", "router"))
    await valkey.delete("m:{r}:epoch:router")
    with pytest.raises(Fenced):
        await owner.append([entry("1")])


async def test_roles_have_epochs_of_their_own(valkey: Redis) -> None:
    router = RunStreams(valkey, "r", role="router", epoch=await next_epoch(valkey, "r", "router"))
    await next_epoch(valkey, "r", "bank")
    await next_epoch(valkey, "other", "router")
    assert await router.append([entry("1")]) == [True]


async def test_concurrent_retries_write_one_entry(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    async with asyncio.TaskGroup() as tasks:
        tries = [tasks.create_task(streams.append([entry("1")])) for _ in range(20)]
    assert sum(t.result()[0] for t in tries) == 1
    assert len(await streams.read_all("events")) == 1


async def test_all_pages_are_read(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    for page in range(5):
        await streams.append([entry(f"{page}/{n}", b"%d" % (page * 500 + n)) for n in range(500)])
    found = await streams.read_all("events")
    assert [int(m.data) for m in found] == list(range(2500))
    assert [int(m.data) for m in await streams.read_all("events", found[1699].id)] == list(
        range(1700, 2500)
    )
    assert await streams.read_all("events", found[-1].id) == []


async def test_a_stream_of_exactly_one_page_ends(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await streams.append([entry(str(n)) for n in range(1000)])
    assert len(await streams.read_all("events")) == 1000


async def test_a_stream_that_is_not_there_is_empty(valkey: Redis) -> None:
    assert await RunStreams(valkey, "r").read_all("events") == []


async def test_tail_gives_what_is_new_on_each_stream(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await streams.append([entry("1", b"a"), entry("2", b"b", "fates")])
    found = await streams.tail({"events": "0-0", "fates": "0-0"}, block_ms=10)
    assert [(m.stream, m.data) for m in found] == [("events", b"a"), ("fates", b"b")]
    after = {m.stream: m.id for m in found}
    assert await streams.tail(after, block_ms=1) == []
    await streams.append([entry("3", b"c", "fates")])
    assert [m.data for m in await streams.tail(after, block_ms=10)] == [b"c"]


async def test_tail_wakes_for_an_entry_that_comes_while_it_waits(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(streams.tail({"events": "0-0"}, block_ms=10_000))
        await tasks.create_task(streams.append([entry("1", b"a")]))
    assert [m.data for m in waiting.result()] == [b"a"]


async def test_an_entry_without_data_reads_as_empty(valkey: Redis) -> None:
    await valkey.xadd("m:{r}:events", {"x": "y"})
    assert [m.data for m in await RunStreams(valkey, "r").read_all("events")] == [b""]


async def test_plain_fields_stand_beside_the_data(valkey: Redis) -> None:
    await RunStreams(valkey, "r").append([entry("1", plain=(("group", "g"), ("seq", "0")))])
    [(_, fields)] = await valkey.xrange("m:{r}:events")
    assert fields == {b"d": b"x", b"group": b"g", b"seq": b"0"}


async def test_a_reader_says_how_far_it_is_and_a_former_one_no_longer(valkey: Redis) -> None:
    old = RunStreams(valkey, "r", role="router", epoch=await next_epoch(valkey, "r", "router"))
    new = RunStreams(valkey, "r", role="router", epoch=await next_epoch(valkey, "r", "router"))
    assert await new.read_by("router") == {}
    await new.mark_read({"fates": "2-0", "batches": "0"})
    with pytest.raises(Fenced):
        await old.mark_read({"fates": "1-0"})
    assert await new.read_by("router") == {"fates": "2-0", "batches": "0"}


async def test_a_version_is_written_once_per_stage(valkey: Redis) -> None:
    durable, published = ev.VERSION_STAGE_DURABLE, ev.VERSION_STAGE_PUBLISHED
    for version, stage in ((1, durable), (1, durable), (1, published), (2, durable)):
        record = ev.PolicyVersionRecord(version=version, parent=version - 1, stage=stage)
        await append_version(valkey, "r", record)
    assert len(await RunStreams(valkey, "r").read_all("versions")) == 3
    newest = await latest_version(valkey, "r", durable)
    assert newest is not None
    assert newest.version == 2
    served = await latest_version(valkey, "r", published)
    assert served is not None
    assert served.version == 1
    assert await latest_version(valkey, "other", durable) is None


@pytest.mark.parametrize("rubbish", [b"", b"\xff\xff rubbish"])
async def test_an_entry_that_is_no_version_stops_nobody(valkey: Redis, rubbish: bytes) -> None:
    durable = ev.VERSION_STAGE_DURABLE
    record = ev.PolicyVersionRecord(version=1, parent=0, stage=durable)
    await append_version(valkey, "r", record)
    await RunStreams(valkey, "r").append([StreamEntry("versions", "rubbish", "1", rubbish)])
    newest = await latest_version(valkey, "r", durable)
    assert newest is not None
    assert newest.version == 1


async def opened(url: str, **more: Any) -> None:
    async with connect(RedisConfig(url=url, **more)):
        pass


async def test_a_durable_server_is_accepted(valkey_socket: Path) -> None:
    async with connect(RedisConfig(url=f"unix://{valkey_socket}")) as client:
        assert await client.ping()


async def test_a_server_without_append_only_file_is_refused(
    tmp_path: Path, server_at: ServerAt
) -> None:
    with server_at(tmp_path) as socket:
        with pytest.raises(ConfigError, match="no append-only file") as caught:
            await opened(f"unix://{socket}")
        assert "redis.allow_volatile" in caught.value.way_out
        await opened(f"unix://{socket}", allow_volatile=True)


async def test_no_server_configured(valkey_socket: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        await opened("")
    assert (caught.value.field, "muster up" in caught.value.way_out) == ("redis.url", True)


async def test_an_unreachable_server_is_named_without_its_password(tmp_path: Path) -> None:
    for url, shown in (
        (f"unix://{tmp_path}/nobody", f"unix://{tmp_path}/nobody"),
        ("redis://user:secret@127.0.0.1:1/0", "redis://127.0.0.1:1/0"),
        ("redis://127.0.0.1:1/0?password=secret", "redis://127.0.0.1:1/0?…"),
    ):
        with pytest.raises(Unavailable, match="cannot be reached") as caught:
            await opened(url, timeout_s=1)
        assert (caught.value.field, caught.value.value) == ("redis.url", shown)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://host", "localhost:6379", "redis://h:port"])
async def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await opened(url, timeout_s=1)
    assert (caught.value.field, caught.value.value) == ("redis.url", url)


async def test_a_server_that_went_away_is_unavailable(tmp_path: Path, server_at: ServerAt) -> None:
    with server_at(tmp_path, "--appendonly", "yes") as socket:
        stack = connect(RedisConfig(url=f"unix://{socket}", timeout_s=1))
        client = await stack.__aenter__()
        streams = RunStreams(client, "r")
        await streams.append([entry("1")])
    try:
        for call in (
            streams.append([entry("2")]),
            streams.read_all("events"),
            streams.tail({"events": "0"}),
            streams.payloads(["p"]),
            next_epoch(client, "r", "router"),
        ):
            with pytest.raises(Unavailable, match="does not answer"):
                await call
    finally:
        await stack.__aexit__(None, None, None)


async def test_a_server_that_hangs_is_unavailable_in_bounded_time(
    tmp_path: Path, server_at: ServerAt
) -> None:
    with server_at(tmp_path, "--appendonly", "yes") as socket:
        async with connect(RedisConfig(url=f"unix://{socket}", timeout_s=0.1)) as client:
            pid = (await client.info("server"))["process_id"]
            os.kill(pid, signal.SIGSTOP)
            try:
                async with asyncio.timeout(20):
                    with pytest.raises(Unavailable):
                        await RunStreams(client, "r").read_all("events")
            finally:
                os.kill(pid, signal.SIGCONT)


async def test_a_long_tail_is_not_cut_by_the_reply_limit(valkey_socket: Path) -> None:
    async with connect(RedisConfig(url=f"unix://{valkey_socket}", timeout_s=0.6)) as client:
        assert await RunStreams(client, "none").tail({"events": "0"}, block_ms=5000) == []
