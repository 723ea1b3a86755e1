"""The whole system on real parts: weights arrive exactly, and every call of the contract is made.

One `muster up` with the real engine collects two batches; two fresh engines then start from the
trainer's checkpoints. About four minutes.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from muster import rpc
from muster.client import MusterClient, Progress
from muster.config import RedisConfig
from muster.errors import InvalidInput
from muster.record import RunRecord, read_record
from muster.registry import Registry
from muster.streams import connect
from muster.supervise.state import runtime_dir
from muster.transfer import manifest as weights
from muster.transfer.wire import manifest_to_pb
from muster.types import SamplingParams
from muster.v1 import common_pb2 as common
from muster.v1 import (
    inference_pb2,
    readybank_pb2,
    router_pb2,
    sandbox_pb2,
    trainer_pb2,
)
from muster.v1 import inference_pb2 as inf
from muster.v1 import readybank_pb2 as rb
from muster.v1 import router_pb2 as rt
from muster.v1 import trainer_pb2 as tr
from muster.v1.inference_pb2_grpc import InferenceServiceStub
from muster.v1.readybank_pb2_grpc import ReadyBankServiceStub
from muster.v1.router_pb2_grpc import RouterServiceStub
from muster.v1.trainer_pb2_grpc import TrainerServiceStub
from tests.e2e.host_calls import forked_text
from tests.e2e.leftovers import Muster
from tests.integration.test_inference_weights import Redises, Replica, Service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.root,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),
]
RUN = "main"
TASKS = Path(__file__).parents[2] / "tasks"
ONE_COMMAND = ("copy-file", "make-directory", "write-word", "touch-file")
WAIT_S = 600.0
Scores = list[list[float]]


@dataclass
class Whole:
    """What one run of the whole left behind."""

    state: Path
    record: RunRecord
    checkpoints: dict[int, Path]
    scores: dict[int, list[Scores]] = field(default_factory=dict)  # all that were seen, by version
    cancelled: Progress | None = None
    refused_update: str = ""
    refused_calls: list[str] = field(default_factory=list)
    after_refused_update: tuple[set[int], Scores] = (set(), [])
    trainer: tr.GetTrainerStatusResponse | None = None
    batch: str = ""
    forked: str = ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return asyncio.run(_run(tmp_path_factory.mktemp("whole")))


async def _run(folder: Path) -> Whole:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "muster.toml"
    config.write_text(f"[router]\nlisten = '{address}'\n[trainer]\ncheckpoints_kept = 4\n")
    state = folder / "state"
    muster = Muster(state, "up", config=config)
    try:
        ready = asyncio.to_thread(muster.until, _ready)
        await asyncio.wait_for(ready, WAIT_S)
        url = f"unix://{runtime_dir(state.resolve())}/valkey.sock"
        async with connect(RedisConfig(url=url)) as redis:
            found = await _exercise(redis, state, address, folder)
    finally:
        status, _ = await asyncio.to_thread(muster.interrupt)
    assert status == 0
    return found


def _ready(line: dict[str, Any]) -> bool:
    return line["event"] == "line" and str(line["text"]).startswith("ready")


def _task_set(folder: Path) -> Path:
    chosen = folder / "tasks"
    chosen.mkdir()
    for name in ONE_COMMAND:
        (chosen / name).symlink_to(TASKS / name)
    return chosen


async def _exercise(redis: Redis, state: Path, address: str, folder: Path) -> Whole:
    whole = Whole(state, RunRecord(RUN), {})
    async with _replica(redis) as replica, MusterClient(address) as client:
        await _score(replica, whole)
        job = await client.submit(
            _task_set(folder), groups=8, group_size=4, sampling=SamplingParams(temperature=0.7)
        )
        async with asyncio.timeout(WAIT_S):
            while 2 not in whole.scores:
                await _score(replica, whole)
                await asyncio.sleep(0.3)
            async for _ in client.watch(job):
                pass
        whole.cancelled = await _cancel_one(client, address)
        whole.refused_update = await _refused_update(redis, replica, whole)
        whole.after_refused_update = await replica.scores()
        whole.refused_calls = await _refused_calls(redis, client, job)
        whole.trainer = await _trainer_status(redis)
        whole.batch = await _batch_explained(redis)
        [host] = await Registry(redis, RUN).list("sandbox")
        whole.forked = await forked_text(host.address, TASKS / ONE_COMMAND[0])
    whole.record = await read_record(redis, RUN)
    whole.checkpoints = {
        v.version: Path(v.checkpoint) for v in whole.record.versions if v.checkpoint
    }
    return whole


@asynccontextmanager
async def _replica(redis: Redis) -> AsyncIterator[Replica]:
    [entry] = await Registry(redis, RUN).list("inference")
    async with rpc.channel(entry.address) as channel:
        yield Replica((entry.id, entry.address), InferenceServiceStub(channel))


async def _score(replica: Replica, whole: Whole) -> None:
    """Scores under the version being served; the answer names it. While episodes run they depend on
    what is computed in the same step, so those of a version are asked for until it ends: the
    replica is idle for as long as its last batch is trained on."""
    versions, scores = await replica.scores()
    if len(versions) == 1:
        seen = whole.scores.setdefault(versions.pop(), [])
        seen += [scores] if scores not in seen else []


async def _refused_calls(redis: Redis, client: MusterClient, job: str) -> list[str]:
    """What this run has no cause for: both are answered by what is missing."""
    refused = []
    try:
        await client.evaluation(job)
    except InvalidInput as error:
        refused.append(error.problem)
    [entry] = await Registry(redis, RUN).list("readybank")
    epoch = (await _trainer_status(redis)).trainer_epoch
    given = rb.ReturnGroupsRequest(run=RUN, trainer_epoch=epoch, step=99)
    async with rpc.channel(entry.address) as channel:
        stub: Any = ReadyBankServiceStub(channel)
        try:
            await stub.ReturnGroups(given, timeout=10)
        except grpc.aio.AioRpcError as error:
            refused.append(error.details() or "")
    return refused


async def _cancel_one(client: MusterClient, address: str) -> Progress:
    job = await client.submit(TASKS / "follow-note", groups=1, group_size=4)
    async with asyncio.timeout(WAIT_S):
        async for progress in client.watch(job):
            if progress.episodes_running:
                break
    async with rpc.channel(address) as channel:
        stub: Any = RouterServiceStub(channel)
        answer = await stub.GetJob(rt.GetJobRequest(job=job), timeout=10)
        assert answer.progress.state == rt.JOB_STATE_RUNNING
        told = await stub.Explain(rt.ExplainRequest(subject=job), timeout=10)
        assert told.waiting[0].subject == job
    return await client.cancel(job)


async def _refused_update(redis: Redis, replica: Replica, whole: Whole) -> str:
    """A publication whose sender never comes: given up, and the replica says why."""
    from safetensors.torch import load_file

    record = await read_record(redis, RUN)
    newest = max(record.versions, key=lambda v: v.version)
    tensors = load_file(Path(newest.checkpoint) / "model.safetensors")
    manifest = weights.build(tensors, version=99, parent=newest.version)
    epoch = (await _trainer_status(redis)).trainer_epoch
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        group = inf.TransferGroup(
            backend="gloo",
            host="127.0.0.1",
            port=silent.getsockname()[1],
            rank=1,
            world_size=2,
            generation="never",
            deadline_s=3,
        )
        prepare = inf.PrepareWeightUpdateRequest(
            run=RUN, trainer_epoch=epoch, manifest=manifest_to_pb(manifest), group=group
        )
        await replica.stub.PrepareWeightUpdate(prepare, timeout=30)
        async with asyncio.timeout(60):
            while True:
                status = await replica.stub.GetReplicaStatus(
                    inf.GetReplicaStatusRequest(), timeout=10
                )
                if status.update_phase == inf.UPDATE_PHASE_FAILED:
                    break
                await asyncio.sleep(0.2)
    abort = inf.AbortWeightUpdateRequest(run=RUN, trainer_epoch=epoch, version=99)
    answer = await replica.stub.AbortWeightUpdate(abort, timeout=30)
    assert answer.serving_version == newest.version
    await _abort_nothing(redis, replica)
    return status.update_error


async def _abort_nothing(redis: Redis, replica: Replica) -> None:
    epoch = int(await redis.get(f"m:{{{RUN}}}:epoch:router"))
    key = common.EpisodeKey(run=RUN, group="none", owner_epoch=epoch)
    request = inf.AbortRequest(episode=key, request_id="none")
    assert not (await replica.stub.Abort(request, timeout=10)).found


async def _batch_explained(redis: Redis) -> str:
    """What the bank says of the batch that the trainer waits for."""
    [entry] = await Registry(redis, RUN).list("readybank")
    async with rpc.channel(entry.address) as channel:
        stub: Any = ReadyBankServiceStub(channel)
        told = await stub.ExplainBatch(rb.ExplainBatchRequest(run=RUN), timeout=10)
    return str(told.waiting[0].subject)


async def _trainer_status(redis: Redis) -> tr.GetTrainerStatusResponse:
    [entry] = await Registry(redis, RUN).list("trainer")
    async with rpc.channel(entry.address) as channel:
        stub: Any = TrainerServiceStub(channel)
        status: tr.GetTrainerStatusResponse = await stub.GetTrainerStatus(
            tr.GetTrainerStatusRequest(), timeout=10
        )
    return status


def test_the_bank_says_which_batch_is_waited_for(whole: Whole) -> None:
    assert whole.batch == "batch 3"


def test_two_versions_were_made_published_and_sampled_from(whole: Whole) -> None:
    digests = {v.version: v.digest for v in whole.record.versions}
    assert len(set(digests.values())) == len(digests) == 3
    sampled = {span.version for turn in whole.record.turns for span in turn.spans}
    assert {0, 1} <= sampled
    assert whole.trainer is not None
    assert whole.trainer.version == 2


def test_each_publication_changed_what_the_engine_says(whole: Whole) -> None:
    assert sorted(whole.scores) == [0, 1, 2]
    for before, after in ((0, 1), (1, 2)):
        assert not [seen for seen in whole.scores[after] if seen in whole.scores[before]]


@pytest.mark.parametrize("version", [1, 2])
async def test_the_engine_says_what_a_fresh_one_from_the_checkpoint_says(
    whole: Whole, version: int, tmp_path: Path
) -> None:
    async with Redises.running(tmp_path) as url, connect(RedisConfig(url=url)) as redis:
        config = tmp_path / "muster.toml"
        config.write_text(
            f'state_dir = "{tmp_path}"\nredis.url = "{url}"\n'
            f'model.path = "{whole.checkpoints[version]}"\n'
        )
        async with Service(config, redis).running() as fresh:
            _, scores = await fresh.scores()
    assert scores in whole.scores[version]


def test_an_update_whose_sender_never_comes_leaves_the_served_version_alone(whole: Whole) -> None:
    assert whole.refused_update
    versions, scores = whole.after_refused_update
    assert versions == {2}
    assert scores in whole.scores[2]


def test_a_cancelled_job_is_given_up_and_its_group_has_a_fate(whole: Whole) -> None:
    assert whole.cancelled is not None
    assert whole.cancelled.state == "cancelled"
    assert whole.cancelled.groups_trained == 0


def _spans(whole: Whole, service: str = "*") -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in (whole.state / "traces").glob(f"{service}.jsonl")
        for line in path.read_text().splitlines()
    ]


def test_a_group_is_one_trace_from_its_submission_through_every_service(whole: Whole) -> None:
    submitted = {
        s["trace"] for s in _spans(whole, "router") if s["name"].endswith("/SubmitTaskSet")
    }
    ours = [s for s in _spans(whole) if s["trace"] in submitted]
    names = {s["name"].rpartition("/")[2] for s in ours}
    assert {"OpenGroup", "AcquireBox", "Generate", "Exec", "RecordTurn", "Verify"} <= names
    served = {s["name"] for s in _spans(whole, "inference-*") if s["trace"] in submitted}
    assert "/muster.v1.InferenceService/Generate" in served


def test_a_batch_links_to_the_traces_of_its_groups(whole: Whole) -> None:
    groups = {s["trace"] for s in _spans(whole, "router") if s["name"] == "OpenGroup"}
    frozen = [s for s in _spans(whole, "readybank") if s["name"] == "FreezeBatch"]
    assert len(frozen) == 2
    assert all(len(s["links"]) == 4 and set(s["links"]) <= groups for s in frozen)


def test_a_fork_has_what_was_copied_into_its_box(whole: Whole) -> None:
    assert whole.forked == "carried\n"


def test_every_call_of_the_contract_was_made(whole: Whole) -> None:
    """Read from the traces: a span stands for each call that a service answered."""
    wanted = {
        f"/{service.full_name}/{method.name}"
        for file in (router_pb2, inference_pb2, sandbox_pb2, readybank_pb2, trainer_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    served = {span["name"] for span in _spans(whole)}
    assert len(wanted) == 31
    assert wanted - served == set()
    assert len(whole.refused_calls) == 2
