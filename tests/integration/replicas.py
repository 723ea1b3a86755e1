"""Real replicas (server, driver, pure state) around scripted engines, that die and come back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import msgspec
from redis.asyncio import Redis

from muster import rpc
from muster.registry import Registry
from muster.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server as add
from services.inference.adapters.fake import FakeEngine, Script
from services.inference.driver import ReplicaDriver
from services.inference.engine import Chunk, Finish, Load, Sampling
from services.inference.replica import Bounds, Replica
from services.inference.server import InferenceServicer

_lives = itertools.count(1)


class Watched(FakeEngine):
    """Remembers the names of all requests, and can stop in the middle of replies.

    While it stops it tells of steps all the same: it is no wedge.
    """

    def __init__(self, script: Script):
        super().__init__(script)
        self.asked: list[str] = []
        self.stopped = 0  # replies that stand in their middle
        self._passes: int | None = None  # turns that are replied to before it stops
        self._goes_on = asyncio.Event()
        self._looks = 0

    def turns(self, since: int = 0) -> int:
        """Requests for turns, of all but the first `since` requests."""
        return sum("/probe." not in name for name in self.asked[since:])

    def stop_after(self, turns: int) -> None:
        """Reply to so many turns; later replies stop after their first token until `go_on`."""
        self._passes = turns

    def go_on(self) -> None:
        """Finish all replies."""
        self._passes = None
        self._goes_on.set()

    async def sample(self, request: Sampling) -> AsyncGenerator[Chunk | Finish, None]:
        self.asked.append(request.request_id)
        stops = self._passes is not None and self.turns() > self._passes
        async with aclosing(super().sample(request)) as items:
            async for item in items:
                yield item
                if stops and not self._goes_on.is_set():
                    self.stopped += 1
                    await self._goes_on.wait()

    def load(self) -> Load:
        told = super().load()
        self._looks += self._passes is not None
        return msgspec.structs.replace(told, steps=told.steps + self._looks)


class Process:
    """One life of a replica."""

    def __init__(self, name: str, engine: Watched, driver: ReplicaDriver):
        self.name, self.engine, self.driver = name, engine, driver
        self._serving = AsyncExitStack()

    async def listen(self) -> str:
        """Serve; the address."""
        services = [(add, InferenceServicer(self.name, self.driver))]
        opened = rpc.serve("127.0.0.1:0", services, grace_s=0.0)
        return (await self._serving.enter_async_context(opened)).address

    async def kill(self) -> None:
        """Its connections break and nothing listens there; it stays announced for a while."""
        await self._serving.aclose()

    def rescript(self, **change: object) -> None:
        """Behave otherwise from now on."""
        self.engine.rescript(msgspec.structs.replace(self.engine.script, **change))


class Fleet:
    """Starts replicas of a run; all end with the block of `replicas`."""

    def __init__(self, redis: Redis, run: str, stack: AsyncExitStack):
        self._registry, self._run, self._stack = Registry(redis, run), run, stack

    async def start(self, name: str, script: Script, version: int = 0) -> Process:
        """A new process under that id; a former one of it is no longer found."""
        engine = Watched(script)
        bounds = Bounds(requests_max=64, scores_max=1, tokens_max=1 << 16)
        replica = Replica(self._run, bounds, life=f"life-{next(_lives)}")
        driver = ReplicaDriver(replica, engine, receive_timeout_s=30.0)
        process = Process(name, engine, await self._stack.enter_async_context(driver))
        await driver.start(version)
        address = await process.listen()
        self._stack.push_async_callback(process.kill)
        announced = self._registry.announce("inference", name, address)
        await self._stack.enter_async_context(announced)
        return process


@asynccontextmanager
async def replicas(redis: Redis, run: str) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(redis, run, stack)
