"""Groups that a trainer gives back, on a real server: the bank is killed around it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster import journal
from muster.errors import Fenced, InvalidInput
from muster.rpc import calling
from muster.streams import RunStreams, next_epoch
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from sim.builders import scored
from tests.integration.test_readybank import (
    DEADLINE_S,
    BankProcess,
    Router,
    _acknowledge,
    _ended,
    _lease,
    _register,
    _stub,
)


async def _return(
    stub: object, run: str, *groups: str, epoch: int = 1, reason: str = "kl", kl: float = 0.5
) -> int:
    given = [rb.ReturnedGroup(group=group, reason=reason, measured_kl=kl) for group in groups]
    request = rb.ReturnGroupsRequest(run=run, trainer_epoch=epoch, step=1, groups=given)
    with calling("return"):
        answer = await stub.ReturnGroups(request, timeout=DEADLINE_S)  # type: ignore[attr-defined]
    return int(answer.returned)


def _members(parts: list[bytes]) -> list[str]:
    return [m.group for m in rb.LeaseBatchResponse.FromString(parts[0]).header.members]


async def test_a_batch_is_topped_up_whatever_dies_between(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    """SIGKILL after the return and before others are there; then after the batch was sent anew, and
    a trainer that died with it."""
    router = Router(redis, run, await next_epoch(redis, run, "router"))
    for group in ("g-0", "g-1"):
        await router.group(group, scored(1.0), scored(0.0))
    bank = BankProcess(tmp_path, run, redis_url)
    with _ended(bank):
        bank.start()
        async with _stub(redis, run) as stub:
            await _register(stub, run, 1)
            assert _members(await _lease(stub, run, 1)) == ["g-0", "g-1"]
            assert await _return(stub, run, "g-0") == 1
        bank.end(signal.SIGKILL)
        bank.start()
        async with _stub(redis, run, after="bank-1") as stub:
            assert await _return(stub, run, "g-0") == 1  # the answer may have been lost
            await router.group("g-2", scored(1.0), scored(0.0))
            again = await _lease(stub, run, 1)
            assert _members(again) == ["g-1", "g-2"]
        bank.end(signal.SIGKILL)
        bank.start()
        async with _stub(redis, run, after="bank-2") as stub:
            assert list((await _register(stub, run, 2)).steps_unseen) == [1]
            assert await _lease(stub, run, 1, epoch=2) == again
            assert await _acknowledge(stub, run, 1, epoch=2) == 2
        assert bank.end(signal.SIGTERM) == 0
    streams = RunStreams(redis, run)
    fates = [ev.GroupFate.FromString(m.data) for m in await streams.read_all("fates")]
    assert [(f.group, f.fate, f.reason) for f in fates] == [
        ("g-0", ev.FATE_FILTERED, "returned_kl"),
        ("g-1", ev.FATE_TRAINED, ""),
        ("g-2", ev.FATE_TRAINED, ""),
    ]
    assert fates[0].measured_kl == 0.5
    batches = [ev.BatchRecord.FromString(m.data) for m in await streams.read_all("batches")]
    assert [(b.stage, b.revision, [m.group for m in b.members]) for b in batches] == [
        (ev.BATCH_STAGE_FROZEN, 0, ["g-0", "g-1"]),
        (ev.BATCH_STAGE_RETURNED, 1, ["g-1"]),
        (ev.BATCH_STAGE_FROZEN, 1, ["g-1", "g-2"]),
        (ev.BATCH_STAGE_TRAINED, 1, ["g-1", "g-2"]),
    ]
    for path in sorted((bank.state / "journal").iterdir()):
        replay = journal.verify(path)
        assert replay.events
        assert not replay.problem


async def test_wrong_returns_name_the_field_and_the_way_out(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    router = Router(redis, run, await next_epoch(redis, run, "router"))
    await router.group("g-0", scored(1.0), scored(0.0))
    bank = BankProcess(tmp_path, run, redis_url)
    with _ended(bank):
        bank.start()
        async with _stub(redis, run) as stub:
            await _register(stub, run, 2)
            await _lease(stub, run, 1, epoch=2, groups=1)
            with pytest.raises(Fenced):
                await _return(stub, run, "g-0", epoch=1)
            with pytest.raises(InvalidInput) as caught:
                await _return(stub, run, "g-0", epoch=2, reason="too far off!")
            assert caught.value.field == "groups.reason"
            with pytest.raises(InvalidInput) as caught:
                await _return(stub, run, "g-0", epoch=2, kl=float("nan"))
            assert caught.value.field == "groups.measured_kl"
            with pytest.raises(InvalidInput) as caught:
                await _return(stub, run, epoch=2)
            assert caught.value.field == "groups"
    assert not await RunStreams(redis, run).read_all("fates")
