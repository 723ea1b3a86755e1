"""What the router and the bank decide in service is what the simulations would: the same classes,
and equal commands to equal events, from journals of real runs with a replica that is killed."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from muster import journal, rpc
from muster.config import load_config
from muster.registry import Registry
from muster.streams import Received, RunStreams, next_epoch
from muster.v1 import inference_pb2 as inf
from muster.v1 import inference_pb2_grpc
from services.readybank import events as bank
from services.readybank.adapters.clearing import Clearing
from services.readybank.adapters.scoring import Scorer
from services.readybank.config import ReadyBankConfig, rules
from services.readybank.driver import BankDriver
from services.readybank.machine import BankMachine
from services.router.machine import RouterMachine
from sim.experiment import Parts
from tests.integration.router_world import ScriptedReplica, fleet, router
from tests.integration.test_router import complete, submission, until

POLICIES = {
    "placement": "predicted_finish",
    "admission": "kv_fit",
    "probes": True,
    "reserve_tokens": 100,
}


class Replica(ScriptedReplica):
    """Grants room for a few conversations; one that is `doomed` never answers a turn."""

    def __init__(self, name: str, credit: int, *, doomed: bool = False):
        super().__init__()
        self.name, self.credit, self.doomed = name, credit, doomed
        self.asked = asyncio.Event()  # a turn has come

    async def ClaimReplica(
        self, request: inf.ClaimReplicaRequest, context: Any
    ) -> inf.ClaimReplicaResponse:
        return inf.ClaimReplicaResponse()

    async def GrantKv(self, request: inf.GrantKvRequest, context: Any) -> inf.GrantKvResponse:
        return inf.GrantKvResponse(
            life=f"{self.name}.1",
            state=inf.REPLICA_STATE_SERVING,
            credit_tokens=self.credit,
            ttl_s=5.0,
            block_size=16,
        )

    async def Generate(
        self, request: inf.GenerateRequest, context: Any
    ) -> AsyncIterator[inf.GenerateResponse]:
        if self.doomed and request.episode.group.startswith("job"):
            self.asked.set()
            await asyncio.Event().wait()
        async for part in super().Generate(request, context):
            yield part


async def announced(stack: AsyncExitStack, redis: Redis, run: str, replica: Replica) -> None:
    """It serves until the stack is closed."""
    add: Any = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    server = await stack.enter_async_context(
        rpc.serve("127.0.0.1:0", [(add, replica)], grace_s=0.0)
    )
    entry = Registry(redis, run).announce("inference", replica.name, server.address)
    await stack.enter_async_context(entry)


async def a_router_that_loses_a_replica(redis: Redis, run: str, folder: Path) -> Path:
    """The journal of a job that goes on at the other one."""
    doomed, other = Replica("r0", 9000, doomed=True), Replica("r1", 9000)
    async with (
        fleet(redis, run, replicas=0),
        AsyncExitStack() as rest,
        AsyncExitStack() as first,
        router(redis, run, folder, **POLICIES) as it,
    ):
        await announced(first, redis, run, doomed)
        await announced(rest, redis, run, other)
        await it.stub.SubmitTaskSet(submission(group_size=4), timeout=5)
        await asyncio.wait_for(doomed.asked.wait(), 20)
        await first.aclose()
        await until(it.stub, complete)
    return it.journal


async def a_bank_that_leases(redis: Redis, run: str, folder: Path) -> Path:
    """The journal of a bank that reads what that router wrote, and freezes it as a batch."""
    epoch = await next_epoch(redis, run, "readybank")
    streams = RunStreams(redis, run, role="readybank", epoch=epoch)
    section = ReadyBankConfig()
    machine = BankMachine(rules(load_config(None, {}), section))
    clearing = Clearing(redis, streams, _kept, machine.retiring.gone, epoch=epoch)
    path = folder / "readybank.jsonl"
    lines, stopping = journal.Journal(path, "readybank", machine.rules), asyncio.Event()
    driver = BankDriver(
        streams, section, machine, lines, clearing, Scorer(streams, Registry(redis, run), 1.0)
    )
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run(stopping))
        await driver.recover()
        await driver.feed(bank.TrainerRegistered(1, 0, driver.calls.open("register")[0]))
        call, answer = driver.calls.open("lease")
        await driver.feed(bank.LeaseAsked(1, 1, 1, call, 0.0))
        assert isinstance(await answer, bank.SendBatch)
        stopping.set()
    lines.close()
    return path


async def _kept(entries: list[Received]) -> None:
    """Nothing is over in this story."""
    raise AssertionError(entries)


def commands(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text("utf-8").splitlines()[1:]
    return [command for line in lines for command in json.loads(line)["commands"]]


async def test_recorded_decisions_are_those_of_the_machines_that_simulations_bind(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    of_router = await a_router_that_loses_a_replica(redis, run, tmp_path)
    of_bank = await a_bank_that_leases(redis, run, tmp_path)
    for path in (of_router, of_bank):
        replayed = journal.verify(path)
        assert (replayed.problem, replayed.commands > 0) == ("", True)
    asked = [c for c in commands(of_router) if c["type"] == "Generate"]
    assert {c["replica"] for c in asked if c["retry"]} == {"r1"}, "the dead one's turns moved"
    assert Counter(c["type"] for c in commands(of_router))["ProbeReplica"] == 2
    assert "WriteFrozen" in {c["type"] for c in commands(of_bank)}


def test_simulations_bind_the_machines_that_journals_replay_through() -> None:
    installed = {e.name: e.load() for e in entry_points(group="muster.machines")}
    assert (installed["router"], installed["readybank"]) == (RouterMachine, BankMachine)
    assert (Parts().router, Parts().bank) == (RouterMachine, BankMachine)
    actors = [importlib.import_module(f"sim.rollout.{n}_actor") for n in ("router", "bank")]
    assert [actors[0].RouterMachine, actors[1].BankMachine] == [RouterMachine, BankMachine]
