"""The service as a process with the fake engine: words, versions, no torch, flat memory."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from muster import codec, rpc
from muster.registry import Registry
from muster.types import SamplingParams
from muster.v1 import common_pb2 as common
from muster.v1 import events_pb2 as ev
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import InferenceServiceStub
from tests.versions import append_version

if TYPE_CHECKING:
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub

END = 256


def model_folder(folder: Path) -> Path:
    """A model of bytes: 256 of them and an end; its only weight has no elements."""
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<end>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    weight = {"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    header = json.dumps(weight).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


class Replica:
    def __init__(self, stub: InferenceServiceAsyncStub, run: str, pid: int, model: Path):
        self.stub, self._run, self.pid = stub, run, pid
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._asked = 0

    async def says(self, seed: int) -> tuple[str, tuple[int, ...]]:
        """The text of a reply, and the versions of its tokens."""
        self._asked += 1
        request = pb.GenerateRequest(
            episode=common.EpisodeKey(run=self._run, group="g", owner_epoch=1),
            request_id=str(self._asked),
            prompt_token_ids=codec.pack_ids([1, 2, 3]),
            sampling=codec.sampling_to_pb(SamplingParams(seed=seed)),
            max_tokens=200,
            stop_token_ids=[END],
        )
        parts = [part async for part in self.stub.Generate(request, timeout=10)]
        ids = [token for part in parts for token in codec.unpack_ids(part.token_ids)]
        assert parts[-1].finish.reason == pb.FINISH_REASON_STOP
        versions = tuple(span.version for span in codec.spans_from_pb(parts[-1].finish.spans))
        return self._tokenizer.decode([i for i in ids if i != END]), versions

    def maps(self) -> str:
        return Path(f"/proc/{self.pid}/maps").read_text("utf-8")

    def memory_kib(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text("utf-8").splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@asynccontextmanager
async def replica(folder: Path, redis: Redis, redis_url: str, run: str) -> AsyncIterator[Replica]:
    model, config = model_folder(folder / "model"), folder / "muster.toml"
    config.write_text(
        f'run = "{run}"\nstate_dir = "{folder}"\nredis.url = "{redis_url}"\n'
        f'model.path = "{model}"\n'
        '[inference]\nengine = "fake"\nfollow_versions = true\nisolate = false\n'
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.inference", "--config", str(config)),
        cwd=Path(__file__).parents[2],
    )
    try:
        async with asyncio.timeout(60):
            while not (found := await Registry(redis, run).list("inference")):
                assert process.returncode is None
                await asyncio.sleep(0.02)
        async with rpc.channel(found[0].address) as channel:
            stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
            yield Replica(stub, run, process.pid, model)
    finally:
        process.terminate()
        await process.wait()


async def published(redis: Redis, run: str, version: int) -> None:
    record = ev.PolicyVersionRecord(version=version, stage=ev.VERSION_STAGE_PUBLISHED)
    await append_version(redis, run, record)


async def test_it_speaks_the_model_s_words_the_same_for_the_same_seed(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    async with replica(tmp_path, redis, redis_url, run) as made:
        said = [(await made.says(seed))[0] for seed in range(40)]
        again = [(await made.says(seed))[0] for seed in range(40)]
        assert "libtorch" not in made.maps()

    assert said == again
    commands = [text for text in said if text.startswith("```bash\n")]
    assert len(set(commands)) == len(commands) > 10
    assert said.count("DONE") > 5


async def test_it_serves_the_versions_that_are_recorded(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    await published(redis, run, 3)
    async with replica(tmp_path, redis, redis_url, run) as made:
        assert (await made.says(1))[1] == (3,)
        await published(redis, run, 4)
        async with asyncio.timeout(10):
            while (await made.says(1))[1] != (4,):  # noqa: ASYNC110 - nobody is told of it
                await asyncio.sleep(0.01)
        status = await made.stub.GetReplicaStatus(pb.GetReplicaStatusRequest(), timeout=5)
        assert status.version == 4


@pytest.mark.timeout(600)
async def test_its_memory_does_not_grow_with_requests(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    count = int(os.environ.get("MUSTER_TEST_EXAMPLES", "1000"))
    async with replica(tmp_path, redis, redis_url, run) as made:
        for seed in range(500):
            await made.says(seed)
        before = made.memory_kib()
        for seed in range(count):
            await made.says(seed)
        assert made.memory_kib() - before < 6144  # KiB; it settles within 5 MiB


@pytest.mark.parametrize("count", [10_000])
def test_replies_are_of_every_kind(count: int) -> None:
    from services.inference.adapters.fake_words import reply

    said = [reply((1, 2, 3), seed) for seed in range(count)]
    done = sum(text == "DONE" for text in said) / count
    assert 0.35 < done < 0.43
    assert len(set(said)) > 0.55 * count
