"""A router over real gRPC and a real server of streams, with scripted replicas and hosts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from redis.asyncio import Redis

from muster import rpc, streams
from muster.codec import pack_f32, pack_ids, unpack_ids
from muster.errors import MusterError, NotFound
from muster.journal import Journal
from muster.registry import Registry
from muster.v1 import common_pb2 as pb
from muster.v1 import inference_pb2 as inf
from muster.v1 import inference_pb2_grpc, router_pb2_grpc, sandbox_pb2_grpc
from muster.v1 import sandbox_pb2 as sbx
from services.router.adapters.calls import Calls
from services.router.adapters.clocks import Clocks
from services.router.adapters.durable import Durable
from services.router.config import RouterConfig
from services.router.driver import RouterDriver
from services.router.machine import RouterMachine
from services.router.rules import RouterRules
from services.router.server import RouterServicer
from tests.unit.router.test_conversation import END, Letters

REPLY = [*map(ord, "```bash\ntrue\n```"), END]


class ScriptedReplica(inference_pb2_grpc.InferenceServiceServicer):
    """Answers every request with REPLY; `spoil` changes or fails single answers."""

    def __init__(self) -> None:
        self.requests: list[inf.GenerateRequest] = []
        self.aborted: list[str] = []
        self.dtype = "float32"
        self.spoil: Callable[[inf.GenerateRequest], list[inf.GenerateResponse] | None] = (
            lambda request: None
        )

    async def Generate(
        self, request: inf.GenerateRequest, context: Any
    ) -> AsyncIterator[inf.GenerateResponse]:
        self.requests.append(request)
        for part in self.spoil(request) or answer(REPLY):
            yield part

    async def GetReplicaStatus(self, request: Any, context: Any) -> inf.GetReplicaStatusResponse:
        serving = inf.ServingFingerprint(engine="scripted", dtype=self.dtype)
        return inf.GetReplicaStatusResponse(serving=serving, fingerprint="scripted")

    async def Abort(self, request: inf.AbortRequest, context: Any) -> inf.AbortResponse:
        self.aborted.append(request.request_id)
        return inf.AbortResponse(found=True)


def answer(ids: list[int], *, covered: int | None = None) -> list[inf.GenerateResponse]:
    """One chunk and the finish; spans cover `covered` tokens."""
    span = pb.VersionSpan(version=0, start=0, end=len(ids) if covered is None else covered)
    finish = inf.GenerateFinish(reason=inf.FINISH_REASON_STOP, spans=[span])
    part = inf.GenerateResponse(token_ids=pack_ids(ids), logprobs=pack_f32([-0.5] * len(ids)))
    return [part, inf.GenerateResponse(finish=finish)]


class ScriptedHost(sandbox_pb2_grpc.SandboxServiceServicer):
    """Boxes that do nothing, successfully. `lose` Exec answers per (box, turn) once."""

    def __init__(self) -> None:
        self.executed: list[tuple[str, int, str]] = []
        self.calls: list[tuple[str, int]] = []
        self.released: list[str] = []
        self.changed = asyncio.Condition()
        self.lose_first = False
        self.refuse_exec: MusterError | None = None

    async def AcquireBox(self, request: sbx.AcquireBoxRequest, context: Any) -> Any:
        episode = request.episode
        return sbx.AcquireBoxResponse(box=f"{episode.group}.{episode.sibling}.{episode.attempt}")

    async def Exec(self, request: sbx.ExecRequest, context: Any) -> sbx.ExecResponse:
        if self.refuse_exec is not None:
            raise self.refuse_exec
        place = (request.box, request.turn)
        self.calls.append(place)
        first = self.calls.count(place) == 1
        if first:
            self.executed.append((*place, request.command))
            if self.lose_first:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return sbx.ExecResponse(limit=sbx.STEP_LIMIT_NONE, output_head=b"ok", repeated=not first)

    async def until_released(self, boxes: int) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: len(self.released) >= boxes)

    async def Verify(self, request: sbx.VerifyRequest, context: Any) -> sbx.VerifyResponse:
        return sbx.VerifyResponse(status=sbx.VERDICT_STATUS_REWARDED, reward=1.0)

    async def ReleaseBox(self, request: sbx.ReleaseBoxRequest, context: Any) -> Any:
        async with self.changed:
            self.released.append(request.box)
            self.changed.notify_all()
        return sbx.ReleaseBoxResponse(existed=True)


class BoxHost(ScriptedHost):
    """Boxes that remember what ran in them, and can be lost. `prints`: the output of a step.

    `before` and `after` are waited for around the running of a command.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.boxes: dict[str, str] = {}  # box → attempt
        self.kept: dict[tuple[str, int], sbx.ExecResponse] = {}
        self.made = 0
        self.fresh: list[bool] = []
        self.prints: Callable[[sbx.ExecRequest], str] = lambda request: f"out {request.turn}"
        self.before: Callable[[sbx.ExecRequest], Awaitable[None]] = at_once
        self.after: Callable[[sbx.ExecRequest], Awaitable[None]] = at_once

    async def AcquireBox(self, request: sbx.AcquireBoxRequest, context: Any) -> Any:
        key, self.made = request.episode, self.made + 1
        attempt = f"{key.group}.{key.sibling}.{key.attempt}"
        self.fresh.append(request.fresh)
        if request.fresh:
            self.boxes = {b: a for b, a in self.boxes.items() if a != attempt}
        box = f"{self.name}-{self.made}"
        self.boxes[box] = attempt
        return sbx.AcquireBoxResponse(box=box)

    async def Exec(self, request: sbx.ExecRequest, context: Any) -> sbx.ExecResponse:
        place = (request.box, request.turn)
        await self.before(request)
        self._know(request.box)
        kept = self.kept.get(place)
        if kept is not None:
            return kept
        self.executed.append((*place, request.command))
        answer = sbx.ExecResponse(
            limit=sbx.STEP_LIMIT_NONE, output_head=self.prints(request).encode(), cpu_s=0.5
        )
        self.kept[place] = sbx.ExecResponse()
        self.kept[place].CopyFrom(answer)
        self.kept[place].repeated = True
        await self.after(request)
        return answer

    async def Verify(self, request: sbx.VerifyRequest, context: Any) -> sbx.VerifyResponse:
        self._know(request.box)
        return await super().Verify(request, context)

    def _know(self, box: str) -> None:
        if box not in self.boxes:
            raise NotFound("this host has no such box", field="box", value=box)


async def at_once(request: object) -> None:
    """Waits for nothing."""


class Router:
    """One running incarnation and the stub to talk to it."""

    def __init__(self, stub: Any, driver: RouterDriver, journal: Path, epoch: int, address: str):
        self.stub, self.driver, self.journal, self.epoch = stub, driver, journal, epoch
        self.address = address


@asynccontextmanager
async def router(
    redis: Redis,
    run: str,
    folder: Path,
    durable_type: Callable[[Redis, streams.RunStreams], Durable] = Durable,
    *,
    clocks: Clocks | None = None,
    verify_queue_s: float = 0.0,
    host_away_s: float = 0.0,
    **rules: Any,
) -> AsyncIterator[Router]:
    """Start a router on the run; leaving the block ends it as abruptly as a crash would."""
    epoch = await streams.next_epoch(redis, run, "router")
    machine_rules = RouterRules(run=run, owner_epoch=epoch, **rules)
    machine = RouterMachine(machine_rules)
    path = folder / f"router-{epoch}.jsonl"
    journal = Journal(path, "router", machine_rules)
    durable = durable_type(redis, streams.RunStreams(redis, run, role="router", epoch=epoch))
    calls = Calls(
        Letters(),
        durable.task_archive,
        box_start_timeout_s=5,
        verify_queue_s=verify_queue_s,
        host_away_s=host_away_s,
        clocks=clocks,
    )
    driver = RouterDriver(machine, calls, durable, Registry(redis, run), journal, RouterConfig())
    stopping = asyncio.Event()
    servicer = RouterServicer(driver, run, stopping, RouterConfig(groups_max=100))
    add = router_pb2_grpc.add_RouterServiceServicer_to_server
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(driver.run(stopping), name="router")
            await driver.recover()
            async with (
                rpc.serve("127.0.0.1:0", [(add, servicer)], grace_s=0.1) as server,
                rpc.channel(server.address) as channel,
            ):
                stub = router_pb2_grpc.RouterServiceStub(channel)
                yield Router(stub, driver, path, epoch, server.address)
                stopping.set()
    finally:
        await calls.close()
        journal.close()


@asynccontextmanager
async def fleet(
    redis: Redis, run: str, *, replicas: int = 1, hosts: Sequence[ScriptedHost] = ()
) -> AsyncIterator[tuple[list[ScriptedReplica], ScriptedHost]]:
    """Announced replicas and hosts, one where none is given; answers the first host."""
    registry = Registry(redis, run)
    made = [ScriptedReplica() for _ in range(replicas)]
    hosts = hosts or [ScriptedHost()]
    async with AsyncExitStack() as stack:
        for number, replica in enumerate(made):
            add: Any = inference_pb2_grpc.add_InferenceServiceServicer_to_server
            server = await stack.enter_async_context(rpc.serve("127.0.0.1:0", [(add, replica)]))
            announced = registry.announce("inference", f"r{number}", server.address)
            await stack.enter_async_context(announced)
        add = sandbox_pb2_grpc.add_SandboxServiceServicer_to_server
        for number, host in enumerate(hosts):
            server = await stack.enter_async_context(rpc.serve("127.0.0.1:0", [(add, host)]))
            announced = registry.announce("sandbox", f"h{number}", server.address)
            await stack.enter_async_context(announced)
        yield made, hosts[0]


def decoded(request: inf.GenerateRequest) -> list[int]:
    return unpack_ids(request.prompt_token_ids)
