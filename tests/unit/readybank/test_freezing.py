"""The composition of a step is written once; whoever finds another one there goes no further."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from muster.errors import Refused
from muster.streams import RunStreams, StreamEntry
from services.readybank import events as e
from services.readybank.adapters.feed import frozen_entry, trained_entries
from services.readybank.adapters.freezing import freeze


def batch(step: int, group: str = "job-0") -> e.Batch:
    member = e.BatchMember(group, (0, 0))
    return e.Batch(step, (member,), 1.0, 2.0, trainer_epoch=1, policy_version=0)


def entry(step: int, group: str = "job-0") -> StreamEntry:
    return frozen_entry("r", batch(step, group))


async def test_a_write_whose_answer_was_lost_is_found_there(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await streams.append(trained_entries("r", batch(1), ()))  # of the step, and no composition
    for step in (1, 2, 1):
        await freeze(streams, entry(step))
    assert len(await streams.read_all("batches")) == 3


async def test_another_composition_of_the_step_ends_it(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await streams.append([StreamEntry("batches", "other", "x", b"\xff\xff")])  # a dead letter
    await freeze(streams, entry(1))
    with pytest.raises(Refused, match="recorded already") as caught:
        await freeze(streams, entry(1, "job-1"))
    assert (caught.value.field, caught.value.value) == ("step", "1")


async def test_one_that_was_written_and_is_gone_ends_it(valkey: Redis) -> None:
    streams = RunStreams(valkey, "r")
    await freeze(streams, entry(1))
    await valkey.delete(streams.key("batches"))
    with pytest.raises(Refused):
        await freeze(streams, entry(1))
