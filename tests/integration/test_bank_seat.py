"""The trainer's seat for a bank (services/trainer/ports.py): the fake of its tests, and the real
adapter on a real bank process. Both give groups back in the same way."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster.bank_calls import GrpcBank
from muster.errors import MusterError, Refused
from muster.leased import BatchMember, FrozenBatch, GroupBack, TrainBatch, Trajectory
from muster.registry import Registry
from muster.streams import next_epoch
from muster.types import SamplingParams
from services.trainer.ports import Bank
from sim.builders import scored
from tests.integration.test_readybank import BankProcess, Router, _ended, _stub
from tests.unit.trainer.fakes import FakeBank

GROUPS = ("g-00000", "g-00001", "g-00002")
BACK = GroupBack("g-00001", "kl", 0.25)


class Stage:
    """A bank in front of which a trainer stands: the first two groups are complete."""

    def __init__(self, bank: Bank, third: Callable[[], Awaitable[None]]):
        self.bank, self.third = bank, third


@asynccontextmanager
async def real(folder: Path, redis: Redis, run: str, url: str) -> AsyncIterator[Stage]:
    router = Router(redis, run, await next_epoch(redis, run, "router"))
    epoch = await next_epoch(redis, run, "trainer")
    process = BankProcess(folder, run, url)
    with _ended(process):
        process.start()
        async with _stub(redis, run):
            for group in GROUPS[:2]:
                await router.group(group, scored(1.0), scored(0.0))
            bank = GrpcBank(
                Registry(redis, run),
                run=run,
                epoch=epoch,
                groups=2,
                lease_wait_s=30.0,
                call_deadline_s=20.0,
            )

            async def third() -> None:
                await router.group(GROUPS[2], scored(1.0), scored(0.0))

            yield Stage(bank, third)
            assert process.end(signal.SIGTERM) == 0


@asynccontextmanager
async def fake(folder: Path, redis: Redis, run: str, url: str) -> AsyncIterator[Stage]:
    del folder, redis, run, url
    found = FakeBank({1: _batch(*GROUPS[:2])})
    found.spare = [_batch(GROUPS[2])]

    async def third() -> None:
        """It is there."""

    yield Stage(found, third)


def _batch(*groups: str) -> TrainBatch:
    members = tuple(BatchMember(group, (0, 0)) for group in groups)
    items = tuple(
        Trajectory(group, "task", n, 0, scored(1.0 - n), (), SamplingParams())
        for group in groups
        for n in range(2)
    )
    return TrainBatch(FrozenBatch(1, members), items, returns_left=4)


@pytest.fixture(params=[fake, real])
async def stage(
    request: pytest.FixtureRequest, tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> AsyncIterator[Stage]:
    async with request.param(tmp_path, redis, run, redis_url) as found:
        await found.bank.register(0, (), 0)
        yield found


async def test_what_is_given_back_is_replaced(stage: Stage) -> None:
    first = await stage.bank.lease(1)
    assert first.groups == GROUPS[:2]
    assert await stage.bank.return_groups(1, [BACK]) == 1
    assert await stage.bank.return_groups(1, [BACK]) == 1  # the answer was lost: asked again
    await stage.third()
    again = await stage.bank.lease(1)
    assert again.groups == (GROUPS[0], GROUPS[2])
    assert {item.group for item in again.trajectories} == {GROUPS[0], GROUPS[2]}
    assert (again.frozen.revision, again.frozen.returned) == (1, (BACK.group,))
    assert again.returns_left == first.returns_left - 1
    assert await stage.bank.acknowledge(1, 0) == 2


async def test_what_cannot_be_given_back_is_refused_by_name(stage: Stage) -> None:
    await stage.bank.lease(1)
    cases: list[tuple[int, GroupBack, str]] = [
        (1, GroupBack("g-00007", "kl", 0.1), "groups"),
        (2, BACK, "step"),
    ]
    for step, back, field in cases:
        assert await _refusal(stage.bank, step, back) == field
    await stage.bank.acknowledge(1, 0)
    assert await _refusal(stage.bank, 1, BACK) == "step"


async def _refusal(bank: Bank, step: int, back: GroupBack) -> str:
    with pytest.raises(MusterError) as caught:
        await bank.return_groups(step, [back])
    assert isinstance(caught.value, Refused)
    return caught.value.field
