"""The service as a process without real boxes: what it reports as failed has happened once."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from redis.asyncio import Redis

from muster import codec, rpc
from muster.errors import Fenced, NotFound, Unavailable
from muster.registry import Registry
from muster.types import EpisodeKey
from muster.v1 import common_pb2
from muster.v1 import sandbox_pb2 as pb
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub
from tests.contract.hosts import package

if TYPE_CHECKING:
    from muster.v1.sandbox_pb2_grpc import SandboxServiceAsyncStub

T = TypeVar("T")
LIES = (
    "sandbox.start.after=lie,sandbox.exec.after=lie,sandbox.keep.after=lie@2,"
    "sandbox.verify.after=lie,sandbox.release.after=lie"
)
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def host(
    folder: Path, redis: Redis, redis_url: str, run: str, faults: str = ""
) -> AsyncIterator[SandboxServiceAsyncStub]:
    """A process with made-up boxes, and what to call it by."""
    config = folder / "muster.toml"
    config.write_text(
        f'run = "{run}"\nstate_dir = "{folder}/state"\n[redis]\nurl = "{redis_url}"\n'
        '[sandbox]\nbackend = "fake"\n'
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.sandbox", "--config", str(config)),
        env=os.environ | {"MUSTER_TEST_FAILPOINTS": faults},
        cwd=ROOT,
    )
    try:
        async with asyncio.timeout(60):
            while not (found := await Registry(redis, run).list("sandbox")):
                assert process.returncode is None
                await asyncio.sleep(0.02)
        async with rpc.channel(found[0].address) as channel:
            stub: SandboxServiceAsyncStub = SandboxServiceStub(channel)
            yield stub
    finally:
        process.terminate()
        await process.wait()


async def called(call: Awaitable[T]) -> T:
    with rpc.calling("sandbox"):
        return await call


async def lied(call: Awaitable[object]) -> None:
    with pytest.raises(Unavailable, match="by a failpoint"):
        await called(call)


def keyed(run: str, epoch: int = 1) -> common_pb2.EpisodeKey:
    return codec.key_to_pb(EpisodeKey(run, "g", 0, 0, epoch))


def acquiring(run: str, epoch: int = 1) -> pb.AcquireBoxRequest:
    made = package()
    task = common_pb2.TaskPackage(name="t", digest=made["digest"], archive=made["archive"])
    return pb.AcquireBoxRequest(episode=keyed(run, epoch), task=task, fresh=True)


async def test_what_is_reported_as_failed_is_done_once_and_its_answer_is_kept(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    async with host(tmp_path, redis, redis_url, run, LIES) as stub:
        await lied(stub.AcquireBox(acquiring(run), timeout=10))
        box = (await called(stub.AcquireBox(acquiring(run), timeout=10))).box
        for turn in (0, 1):  # after its answer was there; after it was kept
            step = pb.ExecRequest(
                episode=keyed(run), box=box, turn=turn, command=f"echo {turn}", timeout_s=5
            )
            await lied(stub.Exec(step, timeout=10))
            assert (await called(stub.Exec(step, timeout=10))).repeated
        verify = pb.VerifyRequest(episode=keyed(run), box=box)
        await lied(stub.Verify(verify, timeout=10))
        assert (await called(stub.Verify(verify, timeout=10))).reward in (0.0, 1.0)
        release = pb.ReleaseBoxRequest(episode=keyed(run), box=box)
        await lied(stub.ReleaseBox(release, timeout=10))
        assert not (await called(stub.ReleaseBox(release, timeout=10))).existed


async def test_a_step_whose_result_cannot_be_kept_takes_its_box_along(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    async with host(tmp_path, redis, redis_url, run, "sandbox.keep.before=lie") as stub:
        box = (await called(stub.AcquireBox(acquiring(run), timeout=10))).box
        step = pb.ExecRequest(episode=keyed(run), box=box, command="true", timeout_s=5)
        for named in ("", box):  # with the step; then for good
            with pytest.raises(NotFound) as caught:
                await called(stub.Exec(step, timeout=10))
            assert (caught.value.field, caught.value.value) == ("box", named)
        assert (await called(stub.AcquireBox(acquiring(run), timeout=10))).box != box


async def test_a_claim_fences_the_former_router_and_keeps_its_boxes(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    async with host(tmp_path, redis, redis_url, run) as stub:
        box = (await called(stub.AcquireBox(acquiring(run), timeout=10))).box

        claim = pb.ClaimHostRequest(run=run, owner_epoch=2)
        living = (await called(stub.ClaimHost(claim, timeout=10))).boxes
        assert [(one.box, one.newest_turn) for one in living] == [(box, -1)]

        step = {"box": box, "command": "true", "timeout_s": 5}
        former = pb.ExecRequest(episode=keyed(run), **step)  # type: ignore[arg-type]
        newer = pb.ExecRequest(episode=keyed(run, 2), **step)  # type: ignore[arg-type]
        with pytest.raises(Fenced):
            await called(stub.Exec(former, timeout=10))
        assert (await called(stub.Exec(newer, timeout=10))).cpu_stall_s == 0.0
        assert (await called(stub.ClaimHost(claim, timeout=10))).fenced_calls == 1


async def test_a_box_of_a_host_that_restarted_is_told_as_lost(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    async with host(tmp_path, redis, redis_url, run) as stub:
        box = (await called(stub.AcquireBox(acquiring(run), timeout=10))).box
    async with host(tmp_path, redis, redis_url, run) as stub:
        step = pb.ExecRequest(episode=keyed(run), box=box, command="true", timeout_s=5)
        with pytest.raises(NotFound) as caught:
            await called(stub.Exec(step, timeout=10))
        assert caught.value.field == "box"


def memory_kib(folder: Path) -> int:
    """Of the host whose configuration lies in `folder`."""
    mark = str(folder / "muster.toml").encode()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (path / "cmdline").read_bytes():
                lines = (path / "status").read_text("utf-8").splitlines()
                return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    raise AssertionError("it does not run")


async def episode(stub: SandboxServiceAsyncStub, run: str, number: int) -> None:
    """One box, two steps, a verdict, its end."""
    key = codec.key_to_pb(EpisodeKey(run, f"g{number}", 0, 0, 1))
    asking = acquiring(run)
    asking.episode.CopyFrom(key)
    box = (await called(stub.AcquireBox(asking, timeout=10))).box
    for turn in (0, 1):
        step = pb.ExecRequest(episode=key, box=box, turn=turn, command="x", timeout_s=5)
        await called(stub.Exec(step, timeout=10))
    await called(stub.Verify(pb.VerifyRequest(episode=key, box=box), timeout=10))
    await called(stub.ReleaseBox(pb.ReleaseBoxRequest(episode=key, box=box), timeout=10))


@pytest.mark.timeout(600)
async def test_its_memory_does_not_grow_with_episodes(
    tmp_path: Path, redis: Redis, redis_url: str, run: str
) -> None:
    count = int(os.environ.get("MUSTER_TEST_EXAMPLES", "1000")) // 5
    async with host(tmp_path, redis, redis_url, run) as stub:
        for number in range(200):
            await episode(stub, run, number)
        before = memory_kib(tmp_path)
        for number in range(200, 200 + count):
            await episode(stub, run, number)
        assert memory_kib(tmp_path) - before < 6144  # KiB; it settles within 5 MiB
