"""The trainer's fleet over real replicas: late joiners, snapshots, and peers that do not answer."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import pytest
import torch
from redis.asyncio import Redis

from muster.clock import monotonic
from muster.registry import Registry
from muster.transfer.publisher import TransferSettings
from services.inference.adapters.fake import Script
from services.inference.adapters.receive import receive_and_verify
from services.inference.replica import State
from services.trainer.adapters.fleet import InferenceFleet
from tests.integration.replicas import Fleet, Process, replicas

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3000,), value, dtype=torch.bfloat16), "b": torch.ones(5, 7)}


def fleet(redis: Redis, run: str, **settings: float) -> InferenceFleet:
    transfer = TransferSettings(**({"timeout_s": 20.0, "call_timeout_s": 5.0} | settings))
    return InferenceFleet(Registry(redis, run), run=run, epoch=1, transfer=transfer)


async def started(world: Fleet, name: str) -> tuple[Process, list[str]]:
    """A replica, and the digests of what it has received."""
    process, received = await world.start(name, Script()), list[str]()

    def receive(manifest: object, source: object) -> str:
        received.append(manifest.digest)  # type: ignore[attr-defined]
        return receive_and_verify(manifest, source)  # type: ignore[arg-type]

    process.engine._receive = partial(receive)
    return process, received


async def test_who_joins_late_gets_the_bytes_of_the_version_whatever_is_trained_meanwhile(
    redis: Redis, run: str
) -> None:
    async with replicas(redis, run) as world:
        mine = fleet(redis, run)
        live = state(1.0)
        digest = mine.take(live, 1, 0)
        first, got_first = await started(world, "first")
        assert (await mine.publish(1, 0)).serving == 1

        live["a"].fill_(7.0)  # the next step moves the weights
        late, got_late = await started(world, "late")
        done = await mine.publish(1, 0)

        assert [report.replica for report in done.reports] == ["late"]
        assert (done.serving, got_first, got_late) == (2, [digest], [digest])
        assert {p.driver.replica.state for p in (first, late)} == {State.SERVING}


async def test_the_newest_version_is_that_of_any_replica_that_answers(
    redis: Redis, run: str
) -> None:
    async with replicas(redis, run) as world:
        mine = fleet(redis, run, call_timeout_s=1.0)
        assert await mine.newest() == 0
        await world.start("old", Script(), version=3)
        await world.start("new", Script(), version=7)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with Stalled(redis, run, [silent]):
                assert await mine.newest() == 7


async def test_a_version_may_be_resent_while_the_next_is_made_and_not_yet_recorded(
    redis: Redis, run: str
) -> None:
    async with replicas(redis, run) as world:
        mine = fleet(redis, run)
        digest = mine.take(state(1.0), 1, 0)
        mine.take(state(2.0), 2, 1)
        _, got = await started(world, "late")
        await mine.publish(1, 0)
        assert got == [digest]
        mine.take(state(3.0), 3, 2)
        _, later = await started(world, "later")
        await mine.publish(1, 0)  # it is being sent for as long as no other one is
        assert later == [digest]


async def test_dead_peers_cost_one_deadline_together_and_others_nothing(
    redis: Redis, run: str
) -> None:
    async with replicas(redis, run) as world:
        mine = fleet(redis, run, timeout_s=3.0, call_timeout_s=1.0)
        mine.take(state(1.0), 1, 0)
        whole, _ = await started(world, "whole")
        silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        try:
            async with asyncio.timeout(60), Stalled(redis, run, silent):
                began = monotonic()
                done = await mine.publish(1, 0)
                took = monotonic() - began
        finally:
            for one in silent:
                one.close()
        assert whole.driver.replica.version == 1
        assert sum(not report.error for report in done.reports) == 1
        assert took < 3.0 + 2.0 + 1.0 + 4.0  # deadline, telling, looking; and a slow machine


async def test_who_is_left_alone_for_a_while_is_fenced_once_another_serves_the_version(
    redis: Redis, run: str
) -> None:
    async with replicas(redis, run) as world:
        mine = fleet(redis, run)
        mine.take(state(1.0), 1, 0)
        full = await world.start("full", Script(fail=frozenset({"receive"})))
        assert (await mine.publish(1, 0)).serving == 0
        assert full.driver.replica.state is State.SERVING  # nobody had it, so it goes on

        await world.start("late", Script())
        await mine.publish(1, 0, skip=["full"])
        await mine.publish(1, 0, skip=["full"])  # the next look

        assert full.driver.replica.state is State.FENCED


async def test_who_is_left_alone_counts_for_the_quorum(redis: Redis, run: str) -> None:
    async with replicas(redis, run) as world:
        mine = fleet(redis, run, quorum=1.0)
        mine.take(state(1.0), 1, 0)
        await world.start("full", Script(fail=frozenset({"receive"})))
        await mine.publish(1, 0)

        late = await world.start("late", Script())
        done = await mine.publish(1, 0, skip=["full"])

        assert "1 replicas hold the version, 2 are needed" in done.reports[0].error
        assert late.driver.replica.version == 0


class Stalled:
    """Peers that are announced, accept connections and say nothing."""

    def __init__(self, redis: Redis, run: str, sockets: list[socket.socket]):
        self._registry = Registry(redis, run)
        self._addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]

    async def __aenter__(self) -> None:
        from contextlib import AsyncExitStack

        self._stack = AsyncExitStack()
        for number, address in enumerate(self._addresses):
            announced = self._registry.announce("inference", f"silent-{number}", address)
            await self._stack.enter_async_context(announced)

    async def __aexit__(self, *reason: object) -> None:
        await self._stack.aclose()
