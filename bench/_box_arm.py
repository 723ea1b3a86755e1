"""The arm under test of bench.sandbox: boxes through gRPC, all of a batch in the same operation.

Owns: the tasks, the calls, their times. Promise: each time is from the beginning of a batch to the
answer of a call; but `kill`, which is what the host tells of a step beyond its time limit: when a
limit fires no caller can see. An answer that is not the one wanted ends the benchmark; a box that
did not start is counted. Does not cover: the control (_bare.py), the figures (sandbox.py).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import grpc

from bench._bare import BASH, FILES, PYTHON, TREE, VERIFY
from muster import codec
from muster.archive import TaskFile, pack_files
from muster.clock import monotonic
from muster.types import EpisodeKey
from muster.v1 import common_pb2
from muster.v1 import sandbox_pb2 as pb
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub

if TYPE_CHECKING:
    from muster.v1.sandbox_pb2_grpc import SandboxServiceAsyncStub

Times = defaultdict[str, list[float]]
T = TypeVar("T")
_WAIT_S = 120.0
_LIMIT_S = (0.5, 2.0)  # of a step that runs into its time limit, alone and among many
_VERIFIER = VERIFY.replace("/tmp", "/logs/verifier")


def task(image: str = "scratch", *, set_up: bool) -> common_pb2.TaskPackage:
    """A task from that image; with a set-up its boxes start from a snapshot."""
    lines = [f"FROM {image}", "WORKDIR /app"]
    texts = {"instruction.md": "Nothing.", "tests/test.sh": _VERIFIER}
    if set_up:
        lines += ["COPY data /app/data", "RUN echo ready > /app/ready"]
        texts |= {f"environment/data/{name}": text for name, text in FILES.items()}
    texts["environment/Dockerfile"] = "\n".join([*lines, ""])
    archive = pack_files({path: TaskFile(0o644, text.encode()) for path, text in texts.items()})
    digest = hashlib.sha256(archive).hexdigest()
    return common_pb2.TaskPackage(name="bench", digest=digest, archive=archive)


class Box:
    """One episode and, once acquired, its box."""

    def __init__(self, episode: common_pb2.EpisodeKey):
        self.episode, self.name, self.source, self.turn = episode, "", 0, -1


class Boxes:
    """Makes and uses boxes. `failed`: those that did not start."""

    def __init__(self, channel: grpc.aio.Channel):
        self._stub: SandboxServiceAsyncStub = SandboxServiceStub(channel)
        self._plain, self._set_up = task(set_up=False), task(set_up=True)
        self._groups, self.failed, self.started = 0, 0, 0

    async def prepare(self) -> None:
        """Everything once: imports, caches, the snapshot that later boxes start from."""
        for package in (self._plain, self._set_up):
            box = self._boxes(1)[0]
            await self._acquire(box, package)
            await self._release(box)
        await self.batch(1, defaultdict(list))

    async def batch(self, at_once: int, times: Times) -> None:
        """`at_once` boxes of each kind through their life."""
        cold = self._boxes(at_once)
        cold = await self._start(cold, self._plain, "start", times)
        await timed(self._step(TREE, _went_well), cold)
        times["release"] += await timed(self._release, cold)
        forked = self._boxes(at_once)
        forked = await self._start(forked, self._set_up, "fork", times)
        _came(forked, pb.BOX_SOURCE_FORK)
        times["step_bash"] += await timed(self._step(BASH, _went_well), forked)
        times["step_python"] += await timed(self._step(PYTHON, _went_well), forked)
        await timed(self._into_the_limit(times["kill"], _LIMIT_S[at_once > 1]), forked)
        times["verify"] += await timed(self._verify, forked)
        times["end"] += await timed(self._release, forked)
        await self._warm(at_once, times)

    async def steps(self, image: str, times: Times) -> None:
        """One box of another image: its start without a pool, a step."""
        box, package = self._boxes(1), task(image, set_up=False)
        await self._start(box, package, "start", times)
        times["step_bash"] += await timed(self._step(BASH, _went_well), box)
        times["end"] += await timed(self._release, box)

    async def _start(
        self, boxes: list[Box], package: common_pb2.TaskPackage, name: str, times: Times
    ) -> list[Box]:
        async def acquire(box: Box) -> None:
            try:
                await self._acquire(box, package)
            except grpc.aio.AioRpcError as error:
                print(f"a box did not start: {error.details()}")

        times[name] += await timed(acquire, boxes)
        started = [box for box in boxes if box.name]
        self.started += len(started)
        self.failed += len(boxes) - len(started)
        return started

    async def _warm(self, at_once: int, times: Times) -> None:
        """A group whose last sibling asks first: the others' boxes stand ready when they ask."""
        await self._capacity(at_once)
        (first,) = self._boxes(1, sibling=at_once)
        await self._acquire(first, self._set_up)
        await self._until(lambda boxes: boxes.warm >= at_once and not boxes.starting)
        waiting = [
            Box(codec.key_to_pb(EpisodeKey(first.episode.run, first.episode.group, n, 0, 1)))
            for n in range(at_once)
        ]
        waiting = await self._start(waiting, self._set_up, "warm", times)
        times["warm_share"].append(_share(waiting, pb.BOX_SOURCE_WARM))
        await timed(self._release, [first, *waiting])
        await self._capacity(0)
        await self._until(lambda boxes: not boxes.warm and not boxes.starting)

    def _boxes(self, count: int, sibling: int = 0) -> list[Box]:
        """Of a run of their own: what a host expects of one run's groups changes no other's."""
        self._groups += 1
        run = f"bench-{self._groups}"
        keys = [EpisodeKey(run, f"g-{number:05d}", sibling, 0, 1) for number in range(count)]
        return [Box(codec.key_to_pb(key)) for key in keys]

    async def _acquire(self, box: Box, package: common_pb2.TaskPackage) -> None:
        asking = pb.AcquireBoxRequest(episode=box.episode, task=package)
        answer = await self._stub.AcquireBox(asking, timeout=_WAIT_S)
        box.name, box.source = answer.box, answer.source

    def _step(
        self, command: str, check: Callable[[pb.ExecResponse], bool], timeout_s: float = 60.0
    ) -> Callable[[Box], Awaitable[None]]:
        async def run(box: Box) -> None:
            await self._exec(box, command, check, timeout_s)

        return run

    async def _exec(
        self,
        box: Box,
        command: str,
        check: Callable[[pb.ExecResponse], bool],
        timeout_s: float,
    ) -> pb.ExecResponse:
        box.turn += 1
        asking = pb.ExecRequest(
            episode=box.episode,
            box=box.name,
            turn=box.turn,
            command=command,
            timeout_s=timeout_s,
        )
        answer = await self._stub.Exec(asking, timeout=_WAIT_S)
        if not check(answer):
            raise SystemExit(f"{command}: {answer}")
        return answer

    def _into_the_limit(
        self, over: list[float], limit_s: float
    ) -> Callable[[Box], Awaitable[None]]:
        """How long after its time limit a step ended, with all that it left running, as told."""

        async def run(box: Box) -> None:
            answer = await self._exec(box, f"{TREE}; sleep 100", _stood_till_the_limit, limit_s)
            over.append((answer.wall_s - limit_s) * 1000)

        return run

    async def _verify(self, box: Box) -> None:
        asking = pb.VerifyRequest(episode=box.episode, box=box.name)
        answer = await self._stub.Verify(asking, timeout=_WAIT_S)
        if answer.reward != 1.0:
            raise SystemExit(f"verify: {answer}")

    async def _release(self, box: Box) -> None:
        asking = pb.ReleaseBoxRequest(episode=box.episode, box=box.name)
        await self._stub.ReleaseBox(asking, timeout=_WAIT_S)

    async def _capacity(self, warm_max: int) -> None:
        await self._stub.SetCapacity(pb.SetCapacityRequest(warm_max=warm_max), timeout=_WAIT_S)

    async def _until(self, done: Callable[[pb.HostBoxes], bool]) -> None:
        async with asyncio.timeout(_WAIT_S):
            while True:
                told = await self._stub.GetHostStatus(pb.GetHostStatusRequest(), timeout=_WAIT_S)
                if done(told.boxes):
                    return
                await asyncio.sleep(0.02)


def _went_well(answer: pb.ExecResponse) -> bool:
    return not answer.exit_code and answer.limit == pb.STEP_LIMIT_NONE


def _stood_till_the_limit(answer: pb.ExecResponse) -> bool:
    return answer.limit == pb.STEP_LIMIT_TIME and bool(answer.output_head)


def _share(boxes: list[Box], source: int) -> float:
    return sum(box.source == source for box in boxes) / max(len(boxes), 1)


def _came(boxes: list[Box], source: int) -> None:
    if _share(boxes, source) < 1:
        raise SystemExit(f"boxes came from {[box.source for box in boxes]}, all {source} wanted")


async def timed(call: Callable[[T], Awaitable[None]], those: Iterable[T]) -> list[float]:
    """Milliseconds from the beginning of the batch to the end of each call."""
    began, took = monotonic(), []

    async def one(that: T) -> None:
        await call(that)
        took.append((monotonic() - began) * 1000)

    async with asyncio.TaskGroup() as tasks:
        for that in those:
            tasks.create_task(one(that))
    return took
