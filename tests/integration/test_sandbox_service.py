"""SandboxService over gRPC, and the service as a process: announced, stopped, killed."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import signal
import sys
import tarfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis

from muster import box_offer, codec, rpc
from muster.archive import TaskFile, pack_files
from muster.errors import Fenced, InvalidInput, NotFound, Unavailable
from muster.registry import Entry, Registry
from muster.types import EpisodeKey
from muster.v1 import common_pb2, sandbox_pb2
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub, add_SandboxServiceServicer_to_server
from services.sandbox import limits
from services.sandbox.adapters import archives
from services.sandbox.adapters.fake import open_fake
from services.sandbox.adapters.native.backend import open_native
from services.sandbox.box import CopiedFile
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from services.sandbox.server import SERVICE_NAME, SandboxServicer

if TYPE_CHECKING:
    from muster.v1.sandbox_pb2_grpc import SandboxServiceAsyncStub

KEY = EpisodeKey("run", "g1", 0, 1, 5)
TEXTS = {
    "instruction.md": "Write 1 to answer.txt.",
    "environment/Dockerfile": "FROM scratch\nWORKDIR /app\n",
    "tests/test.sh": "test -f answer.txt && cat answer.txt > /logs/verifier/reward.txt",
}


def task() -> common_pb2.TaskPackage:
    archive = pack_files({path: TaskFile(0o644, text.encode()) for path, text in TEXTS.items()})
    digest = hashlib.sha256(archive).hexdigest()
    return common_pb2.TaskPackage(name="task", digest=digest, archive=archive)


@pytest.fixture
async def stub() -> AsyncIterator[SandboxServiceAsyncStub]:
    async with open_fake() as backend, SandboxHost(backend, SandboxConfig(), "h1") as host:
        servicer = (add_SandboxServiceServicer_to_server, SandboxServicer(host))
        async with (
            rpc.serve("127.0.0.1:0", [servicer], names=[SERVICE_NAME]) as server,
            rpc.channel(server.address) as channel,
        ):
            yield SandboxServiceStub(channel)


async def walk_through(stub: SandboxServiceAsyncStub, key: EpisodeKey) -> None:
    """Every call of the service, as a router makes them."""
    episode = codec.key_to_pb(key)
    box = await stub.AcquireBox(
        sandbox_pb2.AcquireBoxRequest(episode=episode, task=task()), timeout=30
    )
    assert box.workdir == "/app"
    command = "echo 1 > answer.txt; cat answer.txt; exit 3"
    request = sandbox_pb2.ExecRequest(
        episode=episode, box=box.box, turn=0, command=command, timeout_s=20
    )
    first = await stub.Exec(request, timeout=30)
    assert (first.exit_code, first.output_head + first.output_tail) == (3, b"1\n")
    assert first.limit == sandbox_pb2.STEP_LIMIT_NONE
    assert first.output_bytes_total == 2
    assert not first.repeated
    assert (await stub.Exec(request, timeout=30)).repeated
    verdict = await stub.Verify(sandbox_pb2.VerifyRequest(episode=episode, box=box.box), timeout=60)
    assert (verdict.status, verdict.reward) == (sandbox_pb2.VERDICT_STATUS_REWARDED, 1.0)
    release = sandbox_pb2.ReleaseBoxRequest(episode=episode, box=box.box)
    assert (await stub.ReleaseBox(release, timeout=30)).existed
    assert not (await stub.ReleaseBox(release, timeout=30)).existed


async def test_the_four_calls(stub: SandboxServiceAsyncStub) -> None:
    await walk_through(stub, KEY)


async def test_a_fork_copies_status_and_capacity(stub: SandboxServiceAsyncStub) -> None:
    episode = codec.key_to_pb(KEY)
    into = codec.key_to_pb(EpisodeKey("run", "g1", 1, 1, 5))
    asking = sandbox_pb2.AcquireBoxRequest(episode=episode, task=task())
    got = await stub.AcquireBox(asking, timeout=30)
    assert got.source == sandbox_pb2.BOX_SOURCE_COLD

    archive = archives.write([CopiedFile("answer.txt", data=b"1\n")])
    copying = sandbox_pb2.CopyInRequest(
        episode=episode, box=got.box, folder="/app", archive=archive
    )
    copied = await stub.CopyIn(copying, timeout=30)
    assert (copied.files, copied.bytes) == (1, 2)
    forking = sandbox_pb2.ForkBoxRequest(episode=episode, box=got.box, after_turn=-1, into=into)
    twin = (await stub.ForkBox(forking, timeout=30)).box
    reading = sandbox_pb2.CopyOutRequest(episode=into, box=twin, path="/app/answer.txt")
    out = archives.read((await stub.CopyOut(reading, timeout=30)).archive, 1 << 20)
    assert [(file.path, file.data) for file in out] == [("answer.txt", b"1\n")]

    changing = sandbox_pb2.SetCapacityRequest(boxes_max=7)
    capacity = (await stub.SetCapacity(changing, timeout=30)).capacity
    status = await stub.GetHostStatus(sandbox_pb2.GetHostStatusRequest(), timeout=30)
    assert (capacity.boxes_max, status.capacity.boxes_max) == (7, 7)
    assert (status.host, status.boxes.in_use, status.boxes.snapshots) == ("h1", 2, 1)
    assert status.counts.acquired == {"COLD": 1, "FORK": 1}
    assert status.counts.seconds["fork"].count == 1
    assert status.processors >= 1


async def test_a_copy_that_would_leave_the_box_is_refused_on_the_wire(
    stub: SandboxServiceAsyncStub,
) -> None:
    episode = codec.key_to_pb(KEY)
    asking = sandbox_pb2.AcquireBoxRequest(episode=episode, task=task())
    box = (await stub.AcquireBox(asking, timeout=30)).box
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../out"))
    request = sandbox_pb2.CopyInRequest(
        episode=episode, box=box, folder="/app", archive=sink.getvalue()
    )
    with pytest.raises(InvalidInput) as caught, rpc.calling("copy-in"):
        await stub.CopyIn(request, timeout=30)
    assert (caught.value.field, caught.value.value) == ("archive", "../out")


async def test_errors_travel_with_field_and_way_out(stub: SandboxServiceAsyncStub) -> None:
    episode = codec.key_to_pb(KEY)
    asked = sandbox_pb2.BoxLimits(pids=1 << 20)
    request = sandbox_pb2.AcquireBoxRequest(episode=episode, task=task(), limits=asked)
    with pytest.raises(InvalidInput) as caught, rpc.calling("acquire"):
        await stub.AcquireBox(request, timeout=10)
    assert caught.value.field == "limits.pids"
    assert "sandbox.pids_max" in caught.value.way_out
    step = sandbox_pb2.ExecRequest(episode=episode, box="none", command="x", timeout_s=1)
    with pytest.raises(NotFound), rpc.calling("exec"):
        await stub.Exec(step, timeout=10)
    older = codec.key_to_pb(EpisodeKey("run", "g1", 0, 1, 4))
    with pytest.raises(Fenced), rpc.calling("verify"):
        await stub.Verify(sandbox_pb2.VerifyRequest(episode=older, box="none"), timeout=10)


async def announced(redis: Redis, run: str, process: asyncio.subprocess.Process) -> Entry:
    async with asyncio.timeout(60):
        while process.returncode is None:
            found = await Registry(redis, run).list("sandbox")
            if found and found[0].pid == process.pid:
                return found[0]
            await asyncio.sleep(0.05)
    assert process.stderr
    raise AssertionError((await process.stderr.read()).decode())


async def started(folder: Path, redis_url: str, run: str) -> asyncio.subprocess.Process:
    config = folder / "muster.toml"
    config.write_text(
        f'run = "{run}"\nstate_dir = "{folder}/state"\n[redis]\nurl = "{redis_url}"\n'
        f'[sandbox]\nhost_id = "h1"\nruntime_dir = "{folder}/boxes"\n'
    )
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.sandbox",
        "--config",
        str(config),
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root")
async def test_the_process_announces_itself_serves_and_stops(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    process = await started(tmp_path, redis_url, run)
    entry = await announced(redis, run, process)
    assert (entry.id, entry.info["backend"]) == ("h1", "native")
    offer = box_offer.read(entry.info)
    assert (offer.builds, offer.bases) == (False, ("muster/host-base", "scratch"))
    assert offer.most == limits.most(SandboxConfig())
    assert float(entry.info["verify_timeout_s_max"]) == SandboxConfig().verify_timeout_s_max
    async with rpc.channel(entry.address) as channel:
        stub: SandboxServiceAsyncStub = SandboxServiceStub(channel)
        await walk_through(stub, KEY)
        request = sandbox_pb2.AcquireBoxRequest(episode=codec.key_to_pb(KEY), task=task())
        await stub.AcquireBox(request, timeout=30)
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        await process.communicate()
    assert process.returncode == 0
    assert await Registry(redis, run).list("sandbox") == []
    assert not (tmp_path / "boxes").exists()


def first_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()[0])


def runs(command: str) -> bool:
    """Whether some process of this machine has that command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_text("utf-8", "replace") == command:
                return True
    return False


async def in_a_step(stub: SandboxServiceAsyncStub, callers: asyncio.TaskGroup) -> None:
    """A box in the middle of a step that nothing but a kill would end; its caller is told so."""
    episode = codec.key_to_pb(KEY)
    asking = sandbox_pb2.AcquireBoxRequest(episode=episode, task=task())
    box = (await stub.AcquireBox(asking, timeout=30)).box
    begun = "trap '' TERM; setsid sleep 100 & echo on > begun"
    first = sandbox_pb2.ExecRequest(episode=episode, box=box, turn=0, command=begun, timeout_s=20)
    await stub.Exec(first, timeout=30)
    endless = sandbox_pb2.ExecRequest(
        episode=episode, box=box, turn=1, command="trap '' TERM; sleep 100", timeout_s=100
    )

    async def call() -> None:
        # As the host stops, or as its box is lost.
        with pytest.raises((Unavailable, NotFound)), rpc.calling("exec"):
            await stub.Exec(endless, timeout=120)

    callers.create_task(call())
    await asyncio.sleep(0.2)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root")
async def test_a_stop_does_not_wait_for_steps(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    process = await started(tmp_path, redis_url, run)
    entry = await announced(redis, run, process)
    async with (
        asyncio.timeout(60),
        rpc.channel(entry.address) as channel,
        asyncio.TaskGroup() as callers,
    ):
        await in_a_step(SandboxServiceStub(channel), callers)
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0  # past its limit for a stop, it would exit hard with 1
    assert not (tmp_path / "boxes").exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root")
async def test_the_process_ends_with_its_keeper_and_says_so(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    process = await started(tmp_path, redis_url, run)
    entry = await announced(redis, run, process)
    async with (
        asyncio.timeout(60),
        rpc.channel(entry.address) as channel,
        asyncio.TaskGroup() as callers,
    ):
        await in_a_step(SandboxServiceStub(channel), callers)
        os.kill(first_child(process.pid), signal.SIGKILL)
        _, said = await process.communicate()
    assert process.returncode == 2
    assert said.decode().splitlines()[-1].startswith("sandbox: the keeper of the boxes has gone")
    assert await Registry(redis, run).list("sandbox") == []
    async with open_native(tmp_path / "boxes"):
        pass  # the next start sweeps the groups that the killed keeper left
    assert not (tmp_path / "boxes").exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root")
async def test_a_killed_service_is_followed_by_one_that_goes_on_in_its_boxes(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    episode = codec.key_to_pb(KEY)

    def step(turn: int, command: str) -> sandbox_pb2.ExecRequest:
        return sandbox_pb2.ExecRequest(
            episode=episode, box=box, turn=turn, command=command, timeout_s=20, after_turn=turn - 1
        )

    former = await started(tmp_path, redis_url, run)
    entry = await announced(redis, run, former)
    async with asyncio.timeout(60), rpc.channel(entry.address) as channel:
        stub: SandboxServiceAsyncStub = SandboxServiceStub(channel)
        asking = sandbox_pb2.AcquireBoxRequest(episode=episode, task=task())
        box = (await stub.AcquireBox(asking, timeout=30)).box
        first = await stub.Exec(step(0, "echo 1 > answer.txt; echo said"), timeout=30)
        running = stub.Exec(step(1, "sleep 2.0317; echo late"), timeout=30)
        while not runs("sleep\0002.0317\0"):  # noqa: ASYNC110 - nobody tells when it has begun
            await asyncio.sleep(0.01)
        former.send_signal(signal.SIGKILL)
        with pytest.raises(Unavailable), rpc.calling("exec"):
            await running
        await former.communicate()

    process = await started(tmp_path, redis_url, run)
    entry = await announced(redis, run, process)
    async with asyncio.timeout(60), rpc.channel(entry.address) as channel:
        stub = SandboxServiceStub(channel)
        again = await stub.Exec(step(0, "echo 1 > answer.txt; echo said"), timeout=30)
        assert (again.output_head, again.repeated) == (first.output_head, True)
        late = await stub.Exec(step(1, "sleep 2.0317; echo late"), timeout=30)
        assert (late.output_head + late.output_tail, late.repeated) == (b"late\n", True)
        verdict = await stub.Verify(sandbox_pb2.VerifyRequest(episode=episode, box=box), timeout=60)
        assert verdict.reward == 1.0
        status = await stub.GetHostStatus(sandbox_pb2.GetHostStatusRequest(), timeout=30)
        assert status.counts.adopted == 1
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        await process.communicate()
    assert process.returncode == 0
    assert not (tmp_path / "boxes").exists()
