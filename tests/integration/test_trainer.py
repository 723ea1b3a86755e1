"""The trainer as a process, against the bank as a process: steps, a kill, records, fates.

The model is a random Llama of a few thousand parameters, so what is tested is everything but size.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from redis.asyncio import Redis

from muster.errors import Fenced
from muster.registry import Registry
from muster.rpc import calling, channel
from muster.streams import RunStreams, StreamEntry, next_epoch
from muster.v1 import events_pb2 as ev
from muster.v1 import inference_pb2 as inf
from muster.v1 import trainer_pb2 as pb
from muster.v1.inference_pb2_grpc import InferenceServiceStub
from muster.v1.trainer_pb2_grpc import TrainerServiceStub
from services.trainer.adapters.checkpoint import CheckpointMeta
from services.trainer.adapters.version_log import RedisVersionLog
from services.trainer.ports import VersionRecord
from sim.builders import scored
from tests.integration.test_readybank import BankProcess, Router

if TYPE_CHECKING:
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub
    from muster.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


class Processes:
    """A bank and a trainer of one run, both of which a test may kill."""

    def __init__(self, folder: Path, model: Path, redis: Redis, run: str, redis_url: str):
        self.bank = BankProcess(folder, run, redis_url)
        self.router: Router
        self.checkpoints = self.bank.state / "checkpoints" / run
        self.bank.config.write_text(
            "groups_per_batch = 1\n"
            + self.bank.config.read_text()
            + f'[model]\npath = "{model}"\n'
            + '[inference]\nengine = "fake"\nisolate = false\n'
            + "[trainer]\nthreads = 1\nlr = 1e-2\n"
        )
        self.redis, self.run = redis, run
        self._trainer: subprocess.Popen[bytes] | None = None

    def start_trainer(self) -> None:
        command = [sys.executable, "-m", "services.trainer", "--config", str(self.bank.config)]
        with (self.bank.config.parent / "trainer.log").open("ab") as log:
            self._trainer = subprocess.Popen(command, stderr=log, process_group=0)

    def end_trainer(self, number: signal.Signals) -> int:
        assert self._trainer is not None
        if self._trainer.poll() is None:
            self._trainer.send_signal(number)
        return self._trainer.wait(timeout=15)

    def start_replica(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "services.inference", "--config", str(self.bank.config)]
        with (self.bank.config.parent / "replica.log").open("ab") as log:
            return subprocess.Popen(command, stderr=log, process_group=0)

    async def record(
        self, version: int, stage: ev.VersionStage.ValueType = ev.VERSION_STAGE_DURABLE
    ) -> ev.PolicyVersionRecord:
        """Waits for the record of a version."""
        streams, seen = RunStreams(self.redis, self.run), "0"
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for message in await streams.tail({"versions": seen}):
                    seen = message.id
                    record = ev.PolicyVersionRecord.FromString(message.data)
                    if (record.version, record.stage) == (version, stage):
                        return record

    async def fates(self, count: int) -> list[tuple[str, int, int]]:
        """Waits for so many fates; (group, fate, step) each."""
        streams, found, seen = RunStreams(self.redis, self.run), [], "0"
        async with asyncio.timeout(DEADLINE_S):
            while len(found) < count:
                for message in await streams.tail({"fates": seen}):
                    seen = message.id
                    fate = ev.GroupFate.FromString(message.data)
                    found.append((fate.group, fate.fate, fate.step))
        return found

    async def status(self) -> pb.GetTrainerStatusResponse:
        (entry,) = await Registry(self.redis, self.run).list("trainer")
        async with channel(entry.address) as opened:
            stub: TrainerServiceAsyncStub = TrainerServiceStub(opened)
            with calling("status"):
                return await stub.GetTrainerStatus(pb.GetTrainerStatusRequest(), timeout=10)

    async def waiting(self) -> None:
        """Returns once the trainer has asked for a batch."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if (await self.status()).phase == pb.TRAINER_PHASE_WAITING:
                    return
                await asyncio.sleep(0.05)

    def meta(self, step: int) -> CheckpointMeta:
        text = (self.checkpoints / f"step-{step:06d}" / "meta.json").read_bytes()
        return msgspec.json.decode(text, type=CheckpointMeta)


@contextmanager
def ended(processes: Processes) -> Iterator[None]:
    try:
        yield
    finally:
        if processes._trainer:
            processes.end_trainer(signal.SIGKILL)
        if processes.bank.process:
            processes.bank.end(signal.SIGKILL)


@pytest.fixture
async def processes(
    tmp_path: Path, model: Path, redis: Redis, run: str, redis_url: str
) -> Processes:
    made = Processes(tmp_path, model, redis, run, redis_url)
    made.router = Router(redis, run, await next_epoch(redis, run, "router"))
    return made


async def test_two_batches_become_two_versions(processes: Processes) -> None:
    with ended(processes):
        processes.bank.start()
        processes.start_trainer()
        await processes.router.group("g-0", scored(1.0), scored(0.0), scored(0.0))
        await processes.router.group("g-1", scored(0.0), scored(1.0))
        first, second = await processes.record(1), await processes.record(2)
        assert await processes.fates(2) == [
            ("g-0", ev.FATE_TRAINED, 1),
            ("g-1", ev.FATE_TRAINED, 2),
        ]
        base = await processes.record(0)
        status = await processes.status()
        assert processes.end_trainer(signal.SIGTERM) == 0
    assert len({base.digest, first.digest, second.digest}) == 3
    assert (first.parent, second.parent) == (0, 1)
    assert (first.step.tokens, first.step.trajectories) == (18, 3)
    assert second.step.lag_mean_versions == 1.0
    assert first.step_kl > 0
    assert (status.step, status.version, status.last.digest) == (2, 2, second.digest)
    assert Path(status.checkpoint) == processes.checkpoints / "step-000002"


async def test_a_trainer_killed_after_its_checkpoint_trains_nothing_twice(
    processes: Processes,
) -> None:
    with ended(processes):
        processes.bank.start()
        processes.start_trainer()
        await processes.router.group("g-0", scored(1.0), scored(0.0))
        first = await processes.record(1)  # the checkpoint is durable, the rest is not yet
        processes.end_trainer(signal.SIGKILL)
        processes.start_trainer()
        await processes.router.group("g-1", scored(0.0), scored(1.0))
        second = await processes.record(2)
        assert await processes.fates(2) == [
            ("g-0", ev.FATE_TRAINED, 1),
            ("g-1", ev.FATE_TRAINED, 2),
        ]
        assert processes.end_trainer(signal.SIGTERM) == 0
    one, two = processes.meta(1), processes.meta(2)
    assert (one.digest, two.digest) == (first.digest, second.digest)
    assert (one.trainer_epoch, two.trainer_epoch) == (1, 2)
    assert two.lineage.parents == {0: -1, 1: 0, 2: 1}


async def test_a_bank_that_lost_a_trained_batch_gets_it_back_from_the_checkpoint(
    processes: Processes, redis: Redis, run: str
) -> None:
    """A power cut took the bank's records of step 1; nothing of it is leased a second time."""
    streams = RunStreams(redis, run)
    with ended(processes):
        processes.bank.start()
        processes.start_trainer()
        await processes.router.group("g-0", scored(1.0), scored(0.0))
        await processes.fates(1)
        assert processes.end_trainer(signal.SIGTERM) == 0
        processes.bank.end(signal.SIGKILL)
        (frozen, _) = await streams.read_all("batches")
        for name in ("batches", "fates"):
            await redis.delete(streams.key(name), streams.key("seen", name))
        processes.bank.start()
        processes.start_trainer()
        await processes.router.group("g-1", scored(0.0), scored(1.0))
        assert await processes.fates(2) == [
            ("g-0", ev.FATE_TRAINED, 1),
            ("g-1", ev.FATE_TRAINED, 2),
        ]
        assert processes.end_trainer(signal.SIGTERM) == 0
    assert (await streams.read_all("batches"))[0].data == frozen.data


async def test_a_trainer_asked_to_stop_while_it_loads_ends_in_good_order(
    processes: Processes, redis: Redis, run: str
) -> None:
    """And nobody was told that it serves."""
    folder = processes.checkpoints / "step-000001"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "meta.json")  # reading it blocks until somebody writes
    with ended(processes):
        processes.start_trainer()
        pipe = await _once_read(folder / "meta.json")
        try:
            assert await Registry(redis, run).list("trainer") == []
            assert processes.end_trainer(signal.SIGTERM) == 0
        finally:
            os.close(pipe)


async def _once_read(pipe: Path) -> int:
    """A handle for writing, once somebody waits for what is written."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:  # nobody reads yet
                    raise
            await asyncio.sleep(0.05)


async def test_a_bank_killed_while_a_lease_waits_is_found_again(processes: Processes) -> None:
    with ended(processes):
        processes.bank.start()
        processes.start_trainer()
        await processes.record(0)
        await processes.waiting()
        processes.bank.end(signal.SIGKILL)
        processes.bank.start()
        await processes.router.group("g-0", scored(1.0), scored(0.0))
        assert (await processes.record(1)).step.step == 1
        assert processes.end_trainer(signal.SIGTERM) == 0


async def test_a_replica_takes_the_new_version(
    processes: Processes,
) -> None:
    with ended(processes):
        replica = processes.start_replica()  # serves version 0 when the run is new
        try:
            processes.bank.start()
            processes.start_trainer()
            await processes.router.group("g-0", scored(1.0), scored(0.0))
            published = await processes.record(1, ev.VERSION_STAGE_PUBLISHED)
            assert processes.end_trainer(signal.SIGTERM) == 0
        finally:
            replica.terminate()
            assert replica.wait(timeout=15) == 0
    (report,) = published.publications
    assert report.error == ""
    assert report.latency_s >= report.receive_s > 0
    assert published.digest == processes.meta(1).digest


async def test_a_replica_that_starts_with_other_weights_than_the_run_s_waits_for_the_trainer(
    processes: Processes, redis: Redis, run: str
) -> None:
    """Version 1 is published and in no checkpoint, so a replica that starts has only version 0."""
    config = processes.bank.config
    config.write_text(config.read_text() + "checkpoint_every = 2\n")
    with ended(processes):
        replica = processes.start_replica()
        try:
            processes.bank.start()
            processes.start_trainer()
            await processes.router.group("g-0", scored(1.0), scored(0.0))
            await processes.record(1, ev.VERSION_STAGE_PUBLISHED)
            processes.end_trainer(signal.SIGKILL)
            replica.terminate()
            assert replica.wait(timeout=15) == 0
            replica = processes.start_replica()
            started = await replica_status(redis, run)
            assert (started.state, started.version) == (inf.REPLICA_STATE_FENCED, 0)
            processes.start_trainer()  # goes back to version 0, and trains the step again
            await processes.record(2, ev.VERSION_STAGE_PUBLISHED)
            healed = await replica_status(redis, run)
            assert (healed.state, healed.version) == (inf.REPLICA_STATE_SERVING, 2)
        finally:
            replica.kill()
            replica.wait(timeout=15)


async def replica_status(redis: Redis, run: str) -> inf.GetReplicaStatusResponse:
    """Of the one replica of the run, once it has announced itself."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := await Registry(redis, run).list("inference")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    async with channel(found[-1].address) as opened:
        stub: InferenceServiceAsyncStub = InferenceServiceStub(opened)
        with calling("status"):
            return await stub.GetReplicaStatus(inf.GetReplicaStatusRequest(), timeout=10)


@pytest.mark.parametrize(
    "rubbish", [b"", b"\xff\xff rubbish", ev.PolicyVersionRecord(stage=1).SerializeToString()]
)
async def test_an_entry_that_is_no_version_is_left_out(
    redis: Redis, run: str, rubbish: bytes
) -> None:
    """The last one is its own parent: a walk along the line would never end."""
    await RunStreams(redis, run).append([StreamEntry("versions", "rubbish", "1", rubbish)])
    log = RedisVersionLog(redis, run, await next_epoch(redis, run, "trainer"))
    assert await log.known() == {}


async def test_a_former_trainer_cannot_record_a_version(redis: Redis, run: str) -> None:
    old = RedisVersionLog(redis, run, await next_epoch(redis, run, "trainer"))
    new = RedisVersionLog(redis, run, await next_epoch(redis, run, "trainer"))
    with pytest.raises(Fenced):
        await old.append(VersionRecord(1, 0, "d", "c"))
    await new.append(VersionRecord(1, 0, "d", "c"))
    await new.append(VersionRecord(1, 0, "other", "c"))
    assert [known.digest for known in (await new.known()).values()] == ["d"]
