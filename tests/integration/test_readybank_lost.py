"""The bank as a process: batches that a trainer brings back, and entries that mean nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster.errors import InvalidInput, Refused, Unavailable
from muster.rpc import calling
from muster.streams import RunStreams, StreamEntry
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from tests.integration.test_readybank import (
    DEADLINE_S,
    BankProcess,
    _ended,
    _lease,
    _register,
    _stub,
)


async def test_a_batch_of_another_step_or_run_is_not_taken_back(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    whole = [ev.BatchMember(group="g", attempts=[0])]
    wrong = [
        ev.BatchRecord(run=run, step=2, members=whole),
        ev.BatchRecord(run="another", step=1, members=whole),
        ev.BatchRecord(run=run, step=1),
    ]
    bank = BankProcess(tmp_path, run, redis_url)
    with _ended(bank):
        bank.start()
        async with _stub(redis, run) as stub:
            for batch in wrong:
                request = rb.RegisterTrainerRequest(
                    run=run, trainer_epoch=1, last_durable_step=1, batches=[batch]
                )
                with pytest.raises(InvalidInput) as caught, calling("register"):
                    await stub.RegisterTrainer(request, timeout=DEADLINE_S)
                assert caught.value.field == "batches"
            with pytest.raises(Refused) as refused:
                await _register(stub, run, 1, durable=1)
    assert refused.value.field == "last_durable_step"
    assert not await RunStreams(redis, run).read_all("batches")


async def test_an_entry_that_cannot_be_read_is_counted_and_told(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    streams = RunStreams(redis, run)
    await streams.append([StreamEntry("events", "events", "x", b"\xff\xff\xff")])
    bank = BankProcess(tmp_path, run, redis_url)
    with bank.config.open("a") as file:
        file.write("[readybank]\nstall_s = 0.1\ntick_s = 0.05\n")
    with _ended(bank):
        bank.start()
        async with _stub(redis, run) as stub:
            await _register(stub, run, 1)
            with pytest.raises(Unavailable):
                await _lease(stub, run, 1, deadline_s=1.0)
        assert bank.end(signal.SIGTERM) == 0
    assert "1 unreadable entries left out, newest events" in (tmp_path / "log").read_text()
