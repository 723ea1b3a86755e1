"""The bundled tasks in real boxes; those that try the limits take nothing down with them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from muster import codec, rpc
from muster.taskset import Task, fill, read_task
from muster.types import EpisodeKey
from muster.v1 import common_pb2 as common
from muster.v1 import sandbox_pb2 as pb
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub, add_SandboxServiceServicer_to_server
from services.sandbox.adapters.native.backend import open_native
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from services.sandbox.server import SERVICE_NAME, SandboxServicer

pytestmark = pytest.mark.root

TASKS = Path(__file__).parents[2] / "tasks"
STEP_S = 4.0


class Boxes:
    """A host with real boxes and a few calls to it."""

    def __init__(self, host: SandboxHost, address: str, channel: grpc.aio.Channel):
        self.host, self.address = host, address
        self._stub = SandboxServiceStub(channel)
        self._keys: dict[str, common.EpisodeKey] = {}

    async def acquire(self, task: Task) -> str:
        key = codec.key_to_pb(EpisodeKey("run", f"g{len(self._keys)}", 0, 1, 1))
        package = common.TaskPackage(name=task.name, digest=task.digest, archive=task.archive)
        request = pb.AcquireBoxRequest(episode=key, task=package)
        box: str = (await self._stub.AcquireBox(request, timeout=60)).box
        self._keys[box] = key
        return box

    async def exec(self, box: str, command: str, turn: int = 0) -> pb.ExecResponse:
        request = pb.ExecRequest(
            episode=self._keys[box], box=box, turn=turn, command=command, timeout_s=STEP_S
        )
        return await self._stub.Exec(request, timeout=60)

    async def reward(self, box: str) -> tuple[int, float]:
        verdict = await self._stub.Verify(
            pb.VerifyRequest(episode=self._keys[box], box=box), timeout=60
        )
        request = pb.ReleaseBoxRequest(episode=self._keys[box], box=box)
        await self._stub.ReleaseBox(request, timeout=60)
        return verdict.status, verdict.reward


@pytest.fixture
async def boxes(tmp_path: Path) -> AsyncIterator[Boxes]:
    async with (
        open_native(tmp_path / "boxes") as backend,
        SandboxHost(backend, SandboxConfig(), "h1") as host,
    ):
        servicer = (add_SandboxServiceServicer_to_server, SandboxServicer(host))
        async with (
            rpc.serve("127.0.0.1:0", [servicer], names=[SERVICE_NAME]) as server,
            rpc.channel(server.address) as channel,
        ):
            yield Boxes(host, server.address, channel)


def script(name: str, which: str) -> str:
    return f"bash -c {shlex.quote(fill(TASKS / name, f'solution/{which}.sh'))}"


@pytest.mark.parametrize(
    ("name", "limits", "said"),
    [
        ("stop-ticker", {pb.STEP_LIMIT_TIME}, b""),
        # bash waits for a free place in the process table, so either limit may be the one.
        ("tame-spawner", {pb.STEP_LIMIT_PIDS, pb.STEP_LIMIT_TIME}, b"Resource temporarily"),
        ("fill-exactly", {pb.STEP_LIMIT_DISK}, b"No space left"),
    ],
)
async def test_a_wrong_answer_meets_its_limit_and_is_judged(
    boxes: Boxes, name: str, limits: set[pb.StepLimit.ValueType], said: bytes
) -> None:
    """The verdict is 0, a neighbour works on, and a further box on the host is as good as new."""
    task = read_task(TASKS / name)
    wrong, neighbour = await boxes.acquire(task), await boxes.acquire(task)
    done = await boxes.exec(wrong, script(name, "wrong"))
    assert done.limit in limits, done
    assert said in done.output_head + done.output_tail
    beside = await boxes.exec(neighbour, script(name, "solve"))
    assert beside.limit == pb.STEP_LIMIT_NONE
    assert await boxes.reward(wrong) == (pb.VERDICT_STATUS_REWARDED, 0.0)
    assert await boxes.reward(neighbour) == (pb.VERDICT_STATUS_REWARDED, 1.0)
    later = await boxes.acquire(task)
    await boxes.exec(later, script(name, "solve"))
    assert await boxes.reward(later) == (pb.VERDICT_STATUS_REWARDED, 1.0)
    assert boxes.host.boxes == 0


async def test_a_wrong_answer_can_still_be_mended_in_the_same_box(boxes: Boxes) -> None:
    """A step that hit its time ends; the episode goes on from the files it left."""
    task = read_task(TASKS / "stop-ticker")
    box = await boxes.acquire(task)
    await boxes.exec(box, script("stop-ticker", "wrong"))
    await boxes.exec(box, script("stop-ticker", "solve"), turn=1)
    assert await boxes.reward(box) == (pb.VERDICT_STATUS_REWARDED, 1.0)


def test_every_bundled_task_rewards_its_solution_and_only_that(tmp_path: Path) -> None:
    environment = {**os.environ, "MUSTER_STATE_DIR": str(tmp_path / "s")}
    done = subprocess.run(
        [sys.executable, "-m", "muster.cli.main", "tasks", "check", str(TASKS), "--json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    tried = [event for event in events if event["event"] == "tried"]
    assert [event for event in tried if event["reward"] != event["wanted"]] == []
    assert (len(tried), done.returncode) == (105, 0), done.stderr
