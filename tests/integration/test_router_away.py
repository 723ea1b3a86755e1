"""A sandbox host goes away in the middle of a call, and comes back elsewhere with its boxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from muster import rpc
from muster.registry import Registry
from muster.v1 import inference_pb2 as inf
from muster.v1 import inference_pb2_grpc, sandbox_pb2_grpc
from muster.v1 import sandbox_pb2 as sbx
from tests.integration.router_world import BoxHost, ScriptedReplica, router
from tests.integration.test_router import complete, submission, until
from tests.integration.test_router_resume import recorded

AWAY_S = 20.0
Says = Callable[[inf.GenerateRequest], list[inf.GenerateResponse] | None]
ADD: Any = sandbox_pb2_grpc.add_SandboxServiceServicer_to_server


class Returning(BoxHost):
    """Stands still in its first call of a kind, so that the test can take its service away."""

    def __init__(self, stop_in: str):
        super().__init__("h0")
        self.stop_in, self.reached, self.claims = stop_in, asyncio.Event(), 0

    async def _stand(self, call: str) -> None:
        if call == self.stop_in and not self.reached.is_set():
            self.reached.set()
            await asyncio.Event().wait()

    async def ClaimHost(self, request: sbx.ClaimHostRequest, context: Any) -> Any:
        self.claims += 1
        return sbx.ClaimHostResponse()

    async def Exec(self, request: sbx.ExecRequest, context: Any) -> sbx.ExecResponse:
        answer = await super().Exec(request, context)
        await self._stand("Exec")
        return answer

    async def Verify(self, request: sbx.VerifyRequest, context: Any) -> sbx.VerifyResponse:
        await self._stand("Verify")
        return await super().Verify(request, context)

    async def ReleaseBox(self, request: sbx.ReleaseBoxRequest, context: Any) -> Any:
        await self._stand("ReleaseBox")
        return await super().ReleaseBox(request, context)

    async def AcquireBox(self, request: sbx.AcquireBoxRequest, context: Any) -> Any:
        await self._stand("AcquireBox")
        return await super().AcquireBox(request, context)


@asynccontextmanager
async def serving(registry: Registry, host: BoxHost) -> AsyncIterator[None]:
    """One service of the host, at an address of its own; its end cuts the calls in flight."""
    async with (
        rpc.serve("127.0.0.1:0", [(ADD, host)], grace_s=0.0) as server,
        registry.announce("sandbox", "h0", server.address),
    ):
        yield


@asynccontextmanager
async def replica(registry: Registry, says: Says | None = None) -> AsyncIterator[None]:
    """A replica; `says`: its answers, else those of ScriptedReplica."""
    add: Any = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    scripted = ScriptedReplica()
    if says is not None:
        scripted.spoil = says
    async with (
        rpc.serve("127.0.0.1:0", [(add, scripted)]) as server,
        registry.announce("inference", "r0", server.address),
    ):
        yield


async def away_once(redis: Redis, run: str, folder: Path, host: Returning) -> Any:
    """Progress of a job whose only host was taken away in that call."""
    registry = Registry(redis, run)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(replica(registry))
        it = await stack.enter_async_context(router(redis, run, folder, host_away_s=AWAY_S))
        async with serving(registry, host):
            await it.stub.SubmitTaskSet(submission(), timeout=5)
            await asyncio.wait_for(host.reached.wait(), 10)
        await stack.enter_async_context(serving(registry, host))
        progress = await until(it.stub, complete)
        await host.until_released(2)
    return progress


@pytest.mark.parametrize("call", ["AcquireBox", "Exec", "Verify", "ReleaseBox"])
async def test_a_host_that_comes_back_with_its_boxes_costs_no_episode(
    redis: Redis, run: str, tmp_path: Path, call: str
) -> None:
    host = Returning(call)
    progress = await away_once(redis, run, tmp_path, host)
    assert (progress.repairs, dict(progress.outcomes)) == (0, {"model_success": 2})
    assert len(host.executed) == len(set(host.executed)) == progress.turns
    assert await recorded(redis, run, "box_restored") == []


async def test_the_service_that_came_back_is_told_whose_run_it_is(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    host = Returning("Exec")
    await away_once(redis, run, tmp_path, host)
    assert host.claims == 2


async def test_a_box_that_is_not_there_when_its_host_is_back_is_rebuilt(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    class Forgetful(Returning):
        async def _stand(self, call: str) -> None:
            if call == self.stop_in and not self.reached.is_set():
                self.boxes.clear()
            await super()._stand(call)

    progress = await away_once(redis, run, tmp_path, Forgetful("Exec"))
    assert dict(progress.outcomes) == {"model_success": 2}
    assert len(await recorded(redis, run, "box_restored")) == 2
