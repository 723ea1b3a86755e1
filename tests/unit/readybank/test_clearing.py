"""Of what the router follows nothing goes before it says that it has read it."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster.errors import Fenced
from muster.history import History
from muster.streams import RunStreams, StreamEntry, next_epoch
from muster.types import Fate
from muster.v1 import events_pb2 as ev
from services.readybank import events as e
from services.readybank.adapters.clearing import Clearing
from services.readybank.adapters.feed import fate_entry, frozen_entry

STREAMS = ("versions", "batches", "fates")
STEPS = 4
OVER = e.TrimStreams("", "", step=STEPS, version=STEPS)
"""All versions but the newest, all batches but that of the mark, all fates."""


def version(
    number: int, stage: ev.VersionStage.ValueType = ev.VERSION_STAGE_PUBLISHED
) -> StreamEntry:
    record = ev.PolicyVersionRecord(version=number, stage=stage)
    return StreamEntry("versions", "versions", f"{number}/{stage}", record.SerializeToString())


def batch(step: int) -> StreamEntry:
    return frozen_entry("r", e.Batch(step, (e.BatchMember(f"job-{step}", (0,)),), 0.0, 0.0, 1, 0))


def fate(step: int) -> StreamEntry:
    return fate_entry("r", e.FateRecord(f"job-{step}", Fate.TRAINED, step))


async def recorded(streams: RunStreams) -> dict[str, list[str]]:
    """Four steps; the ids by stream."""
    for step in range(1, STEPS + 1):
        await streams.append([version(step), batch(step), fate(step)])
    return {name: [m.id for m in await streams.read_all(name)] for name in STREAMS}


async def clearing(valkey: Redis, folder: Path) -> Clearing:
    epoch = await next_epoch(valkey, "r", "readybank")
    streams = RunStreams(valkey, "r", role="readybank", epoch=epoch)
    archive = partial(asyncio.to_thread, History(folder).append)
    return Clearing(valkey, streams, archive, lambda group: True, epoch=epoch)


@pytest.mark.parametrize(
    ("read", "left"),
    [
        (None, {"versions": 4, "batches": 4, "fates": 4}),
        (0, {"versions": 4, "batches": 4, "fates": 4}),
        (2, {"versions": 2, "batches": 2, "fates": 2}),
        (4, {"versions": 1, "batches": 1, "fates": 0}),
    ],
    ids=["said-nothing", "read-nothing", "half", "all"],
)
async def test_a_trim_goes_as_far_as_the_router_has_read(
    valkey: Redis, tmp_path: Path, read: int | None, left: dict[str, int]
) -> None:
    streams = RunStreams(valkey, "r", role="router")
    ids = await recorded(streams)
    if read is not None:
        await streams.mark_read({name: ["0", *ids[name]][read] for name in STREAMS})
    await (await clearing(valkey, tmp_path)).trim(OVER)
    assert {name: len(await streams.read_all(name)) for name in STREAMS} == left
    for name in STREAMS:
        kept = [m.id for m in [*History(tmp_path).read(name), *await streams.read_all(name)]]
        assert kept == ids[name]
    for name in ("versions", "batches"):
        assert await valkey.hlen(streams.key("seen", name)) == left[name]


async def test_the_newest_version_of_each_stage_stays(valkey: Redis, tmp_path: Path) -> None:
    """Replicas and the trainer go on from them, however old they are."""
    streams = RunStreams(valkey, "r", role="router")
    await streams.append([version(1), version(1, ev.VERSION_STAGE_DURABLE), version(STEPS)])
    [_, durable, newest] = [m.id for m in await streams.read_all("versions")]
    await streams.mark_read({"versions": newest})
    await (await clearing(valkey, tmp_path)).trim(OVER)
    assert [m.id for m in await streams.read_all("versions")] == [durable, newest]


async def test_a_former_bank_trims_nothing_and_forgets_nothing(
    valkey: Redis, tmp_path: Path
) -> None:
    streams = RunStreams(valkey, "r", role="router")
    ids = await recorded(streams)
    await streams.mark_read({name: ids[name][-1] for name in STREAMS})
    former = await clearing(valkey, tmp_path)
    await next_epoch(valkey, "r", "readybank")
    with pytest.raises(Fenced):
        await former.trim(OVER)
    late = e.GroupOver("job-9", "job", 9, {}, (streams.key("p", "late"),))
    await valkey.set(streams.key("p", "late"), "x")
    with pytest.raises(Fenced):
        await former.retire(late)
    assert {name: [m.id for m in await streams.read_all(name)] for name in STREAMS} == ids
    assert await valkey.hlen(streams.key("seen", "versions")) == STEPS
    assert await valkey.exists(streams.key("p", "late"))
