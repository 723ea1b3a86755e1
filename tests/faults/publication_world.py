"""Real processes for faults of publications: server, bank, trainer, replicas, and a canary.

Owns: starting, killing and asking them, and what the canary saw. Promise: all of them end with the
block; nothing waits without a bound. Does not cover: which faults (publication.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from muster import codec, rpc
from muster.clock import monotonic
from muster.errors import MusterError
from muster.redis_connection import client_at
from muster.registry import Registry
from muster.streams import RunStreams, next_epoch
from muster.v1 import events_pb2 as ev
from muster.v1 import inference_pb2 as pb
from muster.v1 import trainer_pb2 as tr
from muster.v1.inference_pb2_grpc import InferenceServiceStub
from muster.v1.trainer_pb2_grpc import TrainerServiceStub
from sim.builders import scored
from tests.faults.cycling_trainer import RING, TRAIN_S
from tests.integration.test_inference_weights import Redises
from tests.integration.test_readybank import BankProcess, Router

if TYPE_CHECKING:
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub
    from muster.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

RUN = "main"
DEADLINE_S = 45.0  # of a publication, as the trainer is told
TEXTS = (tuple(range(100, 160)), tuple(range(5000, 5100, 3)), tuple([42] * 20))
SMALL_TEXTS = (tuple(range(2, 40)), tuple([7] * 20))
STEP_S, LONG_S = 0.3, 300.0  # of a step: as it is, and while something must happen in it
_CALL_S = 30.0
_LOOK_S = 0.1
Answer = tuple[tuple[float, ...], ...]

_CONFIG = """
groups_per_batch = 1
run = "{run}"
state_dir = "{state}"
[redis]
url = "{url}"
[model]
path = "{model}"
[inference]
{engine}
[trainer]
policy = "fake"
loop = "async"
ahead_max = 1
checkpoint_every = 2
checkpoint_idle_s = 3600
replica_check_s = 1.0
publish_deadline_s = {deadline}
call_deadline_s = 10.0
transport_bytes_per_s = {rate}
"""
_ENGINES = {
    "vllm": "kv_cache_gib = 0.25\nmax_requests = 8\nmax_model_len = 512",
    "fake": 'engine = "fake"\nisolate = false',
}


@dataclass
class Seen:
    """What the canary heard: (replica, version) → answers, and how often none came (it was
    refused, or the version changed between two texts)."""

    answers: dict[tuple[str, int], set[Answer]] = field(default_factory=dict)
    asked: int = 0
    refused: int = 0


class World:
    """See the module. `engine`: vllm or fake."""

    def __init__(self, folder: Path, url: str, redis: Redis, model: Path, engine: str, texts: Any):
        self.folder, self.redis, self.model, self.engine = folder, redis, model, engine
        self.texts = texts
        self.bank = BankProcess(folder, RUN, url)
        size = (model / "model.safetensors").stat().st_size
        self.bank.config.write_text(
            _CONFIG.format(
                run=RUN,
                state=folder / "state",
                url=url,
                model=model,
                engine=_ENGINES[engine],
                deadline=DEADLINE_S,
                rate=size / 1.5,  # a transfer takes so many seconds: time to be killed in
            ),
            "utf-8",
        )
        self.steps_take(STEP_S)
        self.marks = folder / "failpoints"
        self.marks.mkdir()
        self.trainer: subprocess.Popen[bytes] | None = None
        self.replicas: dict[str, subprocess.Popen[bytes]] = {}
        self.seen = Seen()
        self._asking = asyncio.Lock()
        self._router: Router | None = None
        self._groups = 0

    # -- processes ---------------------------------------------------------------------

    def steps_take(self, seconds: float) -> None:
        """Those that begin from now on."""
        (self.folder / "train_s").write_text(str(seconds), "ascii")

    def start_trainer(self, fail: str = "") -> None:
        """`fail`: NAME=ACTION of a failpoint."""
        path = str(self.folder / "train_s")
        environment = {"MUSTER_TEST_BASE": str(self.model), TRAIN_S: path}
        self.trainer = self._start("tests.faults.cycling_trainer", "trainer", fail, environment)

    def start_replica(self, name: str, fail: str = "") -> None:
        arguments = ("--replica", name)
        self.replicas[name] = self._start("services.inference", name, fail, {}, arguments)

    def _start(
        self,
        module: str,
        name: str,
        fail: str,
        environment: dict[str, str],
        arguments: tuple[str, ...] = (),
    ) -> subprocess.Popen[bytes]:
        for mark in self.marks.glob("*"):
            mark.unlink()
        marks = {"MUSTER_TEST_FAILPOINTS": fail, "MUSTER_TEST_FAILPOINT_DIR": str(self.marks)}
        command = [sys.executable, "-m", module, "--config", str(self.bank.config), *arguments]
        environment = os.environ | environment | (marks if fail else {})
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, process_group=0
            )

    @staticmethod
    def kill(process: subprocess.Popen[bytes] | None) -> None:
        """SIGKILL to it and to all that it started."""
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)

    def end(self) -> None:
        for process in (self.trainer, *self.replicas.values(), self.bank.process):
            self.kill(process)

    # -- asking ------------------------------------------------------------------------

    async def batches(self, count: int) -> None:
        """So many batches are complete."""
        if self._router is None:
            self._router = Router(self.redis, RUN, await next_epoch(self.redis, RUN, "router"))
        for _ in range(count):
            await self._router.group(f"g-{self._groups}", scored(1.0), scored(0.0))
            self._groups += 1

    async def until(self, check: Callable[[], Any], what: str, limit_s: float) -> Any:
        """What `check` (a coroutine function) answers, once that is something. TimeoutError."""
        ends = monotonic() + limit_s
        while True:
            found = await check()
            if found:
                return found
            if monotonic() > ends:
                raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
            await asyncio.sleep(_LOOK_S)

    async def records(self) -> list[ev.PolicyVersionRecord]:
        streams = RunStreams(self.redis, RUN)
        messages = await streams.read_all("versions")
        return [ev.PolicyVersionRecord.FromString(message.data) for message in messages]

    async def frozen(self) -> set[int]:
        """Steps whose batches have been composed."""
        messages = await RunStreams(self.redis, RUN).read_all("batches")
        return {ev.BatchRecord.FromString(message.data).step for message in messages}

    async def training(self) -> bool:
        """The trainer says that a step is under way."""
        for entry in await Registry(self.redis, RUN).list("trainer"):
            with contextlib.suppress(MusterError):
                async with rpc.channel(entry.address) as channel:
                    stub: TrainerServiceAsyncStub = TrainerServiceStub(channel)
                    with rpc.calling("status of the trainer"):
                        request = tr.GetTrainerStatusRequest()
                        at = await stub.GetTrainerStatus(request, timeout=5.0)
                if at.phase == tr.TRAINER_PHASE_TRAINING:
                    return True
        return False

    async def status(self, name: str) -> pb.GetReplicaStatusResponse | None:
        """None while it is not there."""
        for entry in await Registry(self.redis, RUN).list("inference"):
            if entry.id == name:
                with contextlib.suppress(MusterError):
                    async with _stub(entry.address) as stub:
                        with rpc.calling(f"status of {name}"):
                            request = pb.GetReplicaStatusRequest()
                            return await stub.GetReplicaStatus(request, timeout=5.0)
        return None

    async def all_serve(self, version: int, limit_s: float = 120.0) -> None:
        """Every replica that was started serves that version."""

        async def served() -> bool:
            found = [await self.status(name) for name in self.replicas]
            return all(
                at is not None and at.version == version and at.state == pb.REPLICA_STATE_SERVING
                for at in found
            )

        await self.until(served, f"every replica serves version {version}", limit_s)

    async def trained(self, steps: int, limit_s: float = 120.0) -> int:
        """The newest version, once it is of that step."""

        async def made() -> int:
            newest = max(await self.records(), key=lambda r: r.version, default=None)
            there = newest is not None and newest.step.step >= steps
            return newest.version + 1 if newest is not None and there else 0

        return int(await self.until(made, f"step {steps} has its version", limit_s)) - 1

    async def place_of(self) -> dict[int, int]:
        """version → place of the ring."""
        return {r.version: r.step.step % RING for r in await self.records()}

    async def scores(self, name: str) -> tuple[int, Answer] | None:
        """The version that the answers name, and the answers; None when it refuses, or changed
        its version in between. One at a time: the bits of what is computed in one batch with
        another text may be others."""
        async with self._asking:
            return await self._scores(name)

    async def _scores(self, name: str) -> tuple[int, Answer] | None:
        found, versions = [], set()
        for entry in await Registry(self.redis, RUN).list("inference"):
            if entry.id != name:
                continue
            with contextlib.suppress(MusterError):
                async with _stub(entry.address) as stub:
                    for text in self.texts:
                        request = pb.ScoreRequest(token_ids=codec.pack_ids(text), temperature=1.0)
                        with rpc.calling(f"score on {name}"):
                            answer = await stub.Score(request, timeout=_CALL_S)
                        versions.add(answer.version)
                        found.append(tuple(codec.unpack_f32(answer.logprobs)))
        if len(found) != len(self.texts) or len(versions) != 1:
            return None
        return versions.pop(), tuple(found)

    async def canary(self) -> None:
        """Asks every replica again and again, until cancelled."""
        while True:
            for name in list(self.replicas):
                self.seen.asked += 1
                got = await self.scores(name)
                if got is None:
                    self.seen.refused += 1
                    continue
                version, answer = got
                self.seen.answers.setdefault((name, version), set()).add(answer)
            await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def _stub(address: str) -> AsyncIterator[InferenceServiceAsyncStub]:
    async with rpc.channel(address) as channel:
        yield InferenceServiceStub(channel)


@asynccontextmanager
async def world(folder: Path, model: Path, engine: str) -> AsyncIterator[World]:
    """Server and bank run; trainer and replicas are for whoever asks. A canary asks all along."""
    texts = TEXTS if engine == "vllm" else SMALL_TEXTS
    async with Redises.running(folder) as url:
        redis = client_at(url)
        made = World(folder, url, redis, model, engine, texts)
        made.bank.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                canary = tasks.create_task(made.canary(), name="canary")
                try:
                    yield made
                finally:
                    canary.cancel()
        finally:
            made.end()
            await redis.aclose()
