"""The engines that the contract is asked of: the scripted one and vLLM, with a trainer's end."""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from muster.model import ensure_model
from muster.transfer import group as transport
from muster.transfer.snapshot import Snapshot
from muster.types import SamplingParams
from services.inference.adapters.fake import FakeEngine, Script
from services.inference.adapters.receive import receive_and_verify
from services.inference.config import InferenceConfig
from services.inference.engine import Chunk, Engine, Finish, Sampling, UpdatePhase, UpdateStatus
from tests.contract.moe import CHOSEN, LAYERS, write_moe

State = dict[str, torch.Tensor]
PROMPT = tuple(range(300, 340))
_DOWN = re.compile(r"down_proj|\.w2\.")
# Prefill and decode run different kernels in bfloat16: 8 bits of mantissa through 30 layers.
SCORE_BOUND = {"fake": 0.0, "vllm": 0.5}


class Bench:
    """An engine, the weights it was started with, and a trainer's end of a transfer."""

    def __init__(self, name: str, engine: Engine, state: State, folder: Path | None = None):
        """folder: the model folder; None for engines that are none."""
        self.name, self.engine, self.state, self.version = name, engine, state, 0
        self.folder = folder

    async def receive(self, state: State, *, corrupt: bool = False) -> UpdateStatus:
        """Let the engine receive the next version of `state`; its status when that is over."""
        snapshot = Snapshot.take(state, version=self.version + 1, parent=self.version)
        manifest, stream = snapshot.manifest, snapshot.stream
        if corrupt:
            stream[0] ^= 1
        meeting = transport.Meeting("127.0.0.1", 2, timeout_s=60)
        name = uuid.uuid4().hex
        spec = transport.GroupSpec("gloo", "127.0.0.1", meeting.port, 0, 2, name, 60.0)

        def send() -> None:
            group = transport.join(spec, store=meeting.store)
            group.broadcast(stream)
            group.close()

        await self.engine.prepare_update(manifest, msgspec.structs.replace(spec, rank=1))
        await asyncio.to_thread(send)
        return await self.arrived()

    async def arrived(self) -> UpdateStatus:
        async with asyncio.timeout(120):
            while True:
                status = await self.engine.update_status()
                if status.phase is not UpdatePhase.RECEIVING:
                    return status
                await asyncio.sleep(0.02)

    def changed(self) -> State:
        """Weights that differ from those the engine started with."""
        return {n: (t * 1.05 if _DOWN.search(n) else t.clone()) for n, t in self.state.items()}


@asynccontextmanager
async def fake_bench() -> AsyncIterator[Bench]:
    engine = FakeEngine(Script(length=200, step_s=0.001), receive=receive_and_verify)
    await engine.start(0)
    yield Bench("fake", engine, {"mlp.down_proj": torch.ones(64, 3), "norm": torch.ones(7)})
    await engine.shutdown()


@asynccontextmanager
async def vllm_bench() -> AsyncIterator[Bench]:
    from safetensors.torch import load_file

    from services.inference.adapters.vllm import VllmEngine

    folder = ensure_model(
        os.environ.get("MUSTER_TEST_MODEL", "smollm2-135m-instruct"), Path(".muster/cache")
    )
    engine = VllmEngine(
        str(folder), InferenceConfig(kv_cache_gib=0.5, max_requests=8, finish_timeout_s=600)
    )
    await engine.start(0)
    yield Bench("vllm", engine, load_file(folder / "model.safetensors"), folder)
    await engine.shutdown()


@asynccontextmanager
async def fake_moe_bench(folder: Path) -> AsyncIterator[Bench]:
    engine = FakeEngine(
        Script(length=200, step_s=0.001, experts=(LAYERS, CHOSEN)), receive=receive_and_verify
    )
    await engine.start(0)
    yield Bench("fake", engine, {"mlp.down_proj": torch.ones(64, 3), "norm": torch.ones(7)})
    await engine.shutdown()


@asynccontextmanager
async def vllm_moe_bench(folder: Path) -> AsyncIterator[Bench]:
    from safetensors.torch import load_file

    from services.inference.adapters.vllm import VllmEngine

    write_moe(folder)
    engine = VllmEngine(str(folder), InferenceConfig(kv_cache_gib=0.1, max_requests=8))
    await engine.start(0)
    yield Bench("vllm", engine, load_file(folder / "model.safetensors"), folder)
    await engine.shutdown()


BENCHES: dict[str, Callable[[], object]] = {"fake": fake_bench, "vllm": vllm_bench}
MOE_BENCHES: dict[str, Callable[[Path], object]] = {"fake": fake_moe_bench, "vllm": vllm_moe_bench}


def sampling(tokens: int, *, seed: int = 7, stop: tuple[int, ...] = (), **more: Any) -> Sampling:
    params = SamplingParams(temperature=1.0, seed=seed)
    return msgspec.structs.replace(Sampling(uuid.uuid4().hex, PROMPT, params, tokens, stop), **more)


async def sampled(engine: Engine, request: Sampling) -> tuple[list[int], list[float], Finish]:
    ids, logprobs = list[int](), list[float]()
    finish: Finish | None = None
    async for item in engine.sample(request):
        assert finish is None, "something came after the Finish"
        if isinstance(item, Chunk):
            ids += item.token_ids
            logprobs += item.logprobs
        else:
            finish = item
    assert finish is not None
    return ids, logprobs, finish
