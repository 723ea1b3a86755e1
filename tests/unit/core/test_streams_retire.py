"""Groups that are over: retired once, counted once, trimmed, and nothing comes after."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from muster.errors import Fenced, Refused
from muster.streams import RunStreams, StreamEntry, next_epoch


def entry(
    dedupe: str, *, needs: str = "", group: str = "job-0", stream: str = "events"
) -> StreamEntry:
    return StreamEntry(stream, f"g:{group}", dedupe, dedupe.encode(), needs=needs)


async def opened(streams: RunStreams, *groups: str) -> None:
    for group in groups:
        payload = {streams.key("p", f"{group}.0"): b"tokens"}
        await streams.append([entry("opened", group=group)])
        await streams.append([entry("e#0", needs="opened", group=group)], payload)
        await streams.append([StreamEntry("fates", "fates", group, b"fate")])


async def retire(streams: RunStreams, group: str = "job-0", index: int = 0, **more: int) -> bool:
    payloads = [streams.key("p", f"{group}.0")]
    totals = {"episodes": 2, **more}
    return await streams.retire(group, job="job", index=index, totals=totals, delete=payloads)


async def contents(valkey: Redis) -> dict[bytes, bytes]:
    keys = [key for key in sorted(await valkey.keys()) if not key.endswith(b":fenced")]
    return {key: await valkey.dump(key) for key in keys}


async def test_an_entry_whose_group_was_never_opened_is_not_written(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    assert await streams.append([entry("e#0", needs="opened")], {"p": b"x"}) == [False]
    assert await valkey.keys() == []


async def test_what_opens_and_what_needs_it_may_come_in_one_call(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    found = await streams.append([entry("opened"), entry("e#0", needs="opened")])
    assert found == [True, True]


async def test_a_retired_group_is_counted_and_leaves_only_its_bit(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await opened(streams, "job-0", "job-1")
    assert await retire(streams, trained=1) is True
    assert await valkey.hgetall("m:{r}:totals:job") == {b"episodes": b"2", b"trained": b"1"}
    assert await valkey.getbit("m:{r}:retired:job", 0) == 1
    assert await valkey.getbit("m:{r}:retired:job", 1) == 0
    assert await valkey.keys("*:g:job-0*") == []
    assert await valkey.keys("*:p:*") == [b"m:{r}:p:job-1.0"]
    assert await valkey.hkeys("m:{r}:seen:fates") == [b"job-1"]


async def test_retiring_again_changes_nothing(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await opened(streams, "job-0")
    await retire(streams)
    before = await contents(valkey)
    assert await retire(streams) is False
    assert await contents(valkey) == before


async def test_a_late_entry_of_a_retired_group_is_not_written(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await opened(streams, "job-0")
    await retire(streams)
    before = await contents(valkey)
    late = [entry("e#1", needs="opened"), entry("l", needs="opened", stream="outcomes")]
    assert await streams.append(late, {streams.key("p", "job-0.1"): b"x"}) == [False, False]
    assert await contents(valkey) == before


async def test_a_retired_group_is_not_opened_again_nor_what_comes_with_it(valkey: Redis) -> None:
    """By an owner that read what there is while it was retired."""
    streams = RunStreams(valkey, "r")
    await opened(streams, "job-0")
    await retire(streams)
    before = await contents(valkey)
    for group, index, taken in (("job-0", 0, False), ("job-1", 1, True)):
        first = StreamEntry("jobs", "jobs", group, b"x")
        again = StreamEntry(
            "events", f"g:{group}", "opened", b"x", unless_bit=(("retired", "job"), index)
        )
        if taken:
            assert await streams.append([first, again]) == [True, True]
        else:
            with pytest.raises(Refused, match="it is over"):
                await streams.append([first, again], {"p": b"x"})
            assert await contents(valkey) == before


async def test_totals_add_up_over_groups(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await opened(streams, "job-0", "job-9")
    await retire(streams)
    await retire(streams, "job-9", 9)
    assert await valkey.hgetall("m:{r}:totals:job") == {b"episodes": b"4"}
    assert await valkey.bitcount("m:{r}:retired:job") == 2


async def test_a_group_without_payloads_and_totals_is_retired_too(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await streams.append([entry("opened")])
    assert await streams.retire("job-0", job="job", index=0, totals={}, delete=[]) is True


async def test_a_former_bank_neither_retires_nor_trims(valkey: Redis) -> None:
    epoch = await next_epoch(valkey, "r", "readybank")
    former = RunStreams(valkey, "r", role="readybank", epoch=epoch)
    await opened(former, "job-0")
    await next_epoch(valkey, "r", "readybank")
    before = await contents(valkey)
    with pytest.raises(Fenced):
        await retire(former)
    with pytest.raises(Fenced):
        await former.trim("fates", "9999999999999-0", ["job-0"])
    with pytest.raises(Fenced):
        await former.drop([former.key("p", "job-0.0")])
    assert await contents(valkey) == before
    assert await valkey.get("m:{r}:epoch:readybank:fenced") == b"3"  # refused, and counted


async def test_the_mark_of_a_former_bank_is_refused_and_counted(valkey: Redis) -> None:
    epoch = await next_epoch(valkey, "r", "readybank")
    former = RunStreams(valkey, "r", role="readybank", epoch=epoch)
    await former.advance_mark(3, b"[1.0]")
    await next_epoch(valkey, "r", "readybank")
    with pytest.raises(Fenced):
        await former.advance_mark(4, b"[2.0]")
    assert await valkey.hgetall("m:{r}:mark") == {b"step": b"3", b"opened": b"[1.0]"}
    assert await valkey.get("m:{r}:epoch:readybank:fenced") == b"1"


async def test_the_mark_never_goes_back(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    for step in (9, 10, 9):  # as numbers, not as texts
        await streams.advance_mark(step, b"[%d.0]" % step)
    assert await valkey.hgetall("m:{r}:mark") == {b"step": b"10", b"opened": b"[10.0]"}


async def test_a_trim_drops_what_is_below_and_keeps_the_id_named(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await streams.append([entry(str(n)) for n in range(5)])
    ids = [message.id for message in await streams.read_all("events")]
    assert await streams.trim("events", ids[3]) == 3
    assert [message.id for message in await streams.read_all("events")] == ids[3:]
    assert await streams.trim("events", ids[3]) == 0


async def test_dedupe_fields_go_with_the_entries_when_that_is_asked_for(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await streams.append([StreamEntry("batches", "batches", f"{n}/frozen", b"") for n in range(3)])
    [*_, last] = await streams.read_all("batches")
    assert await streams.trim("batches", last.id, ["0/frozen", "1/frozen"]) == 2
    assert await valkey.hkeys("m:{r}:seen:batches") == [b"2/frozen"]


async def test_a_trimmed_entry_is_not_written_again(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await streams.append([entry("1"), entry("2")])
    [_, second] = await streams.read_all("events")
    await streams.trim("events", second.id)
    assert await streams.append([entry("1")]) == [False]
