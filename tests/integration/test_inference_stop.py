"""How the service ends: asked to, at any time, and by itself when its engine is wedged.

The engine is the fake or a stand-in whose start blocks a thread, as a real one's does, and has
started a process; everything else is the service as it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis

from muster import codec, rpc
from muster.registry import Registry
from muster.types import SamplingParams
from muster.v1 import common_pb2 as common
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub

START_S, STOP_S = 30.0, 10.0  # limits against hanging; lifecycle's own is 5 s, with status 1
BLOCKED = """
import subprocess, sys, threading, time
from muster.background import in_daemon
from services.inference.__main__ import main
from services.inference.adapters.fake import FakeEngine

class Blocked(FakeEngine):
    def _build(self):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("building", flush=True)
        time.sleep(600)

    async def start(self, version):
        await in_daemon(self._build, "build")

main(lambda settings, folder: Blocked())
"""
WEDGED = """
from services.inference.__main__ import main
from services.inference.adapters.fake import FakeEngine, Script

main(lambda settings, folder: FakeEngine(Script(wedged=True)))
"""


class Service:
    """A process of the service, found again by a mark in its environment."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str):
        self.process, self._mark = process, mark

    async def ended(self) -> int:
        async with asyncio.timeout(STOP_S):
            return await self.process.wait()

    async def line(self) -> bytes:
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            return await self.process.stdout.readline()

    async def all_gone(self) -> None:
        """The kernel ends the processes of a namespace soon after its first."""
        async with asyncio.timeout(STOP_S):
            while self._alive():  # noqa: ASYNC110 - other processes have no event for it
                await asyncio.sleep(0.02)

    def _alive(self) -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (path / "environ").read_bytes():
                    found.append(path.name)
        return found


@pytest.fixture
def config(tmp_path: Path, redis_url: str, run: str) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (model / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    path = tmp_path / "muster.toml"
    path.write_text(
        f'run = "{run}"\nstate_dir = "{tmp_path}"\nredis.url = "{redis_url}"\n'
        f'model.path = "{model}"\n[inference]\nstall_s = 0.3\n'
    )
    return path


@asynccontextmanager
async def service(program: str, config: Path, *, isolate: bool = True) -> AsyncIterator[Service]:
    mark = uuid.uuid4().hex
    environment = {"MUSTER_TEST_MARK": mark, "MUSTER_INFERENCE__ISOLATE": str(isolate).lower()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, "--config", str(config)),
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Service(process, mark)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_while_the_engine_starts_is_orderly_and_leaves_nothing(
    config: Path, number: int, isolate: bool
) -> None:
    async with service(BLOCKED, config, isolate=isolate) as started:
        assert await started.line() == b"building\n"
        started.process.send_signal(number)

        assert await started.ended() == 0
        await started.all_gone()


async def test_a_wedged_engine_ends_the_service_with_an_error(
    config: Path, redis: Redis, run: str
) -> None:
    async with service(WEDGED, config) as started:
        async with asyncio.timeout(START_S):
            while not (entries := await Registry(redis, run).list("inference")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with rpc.channel(entries[0].address) as channel:
            stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
            request = pb.GenerateRequest(
                episode=common.EpisodeKey(run=run, group="g", owner_epoch=1),
                request_id="r",
                prompt_token_ids=codec.pack_ids([1, 2, 3]),
                sampling=codec.sampling_to_pb(SamplingParams()),
                max_tokens=5,
            )
            call = stub.Generate(request, timeout=30)

            assert await started.ended() == 2
            call.cancel()
        await started.all_gone()
