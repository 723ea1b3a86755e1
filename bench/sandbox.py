"""How long boxes take, through gRPC, against a bare clone + overlay + exec of the same command.

Both arms run in turns within each round, one at a time and many at once. Server and client share
one process here, so a call's cost is that of both. Needs root.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import _results
from muster import codec, rpc
from muster.archive import TaskFile, pack_files
from muster.clock import monotonic
from muster.types import EpisodeKey
from muster.v1 import common_pb2
from muster.v1 import sandbox_pb2 as pb
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub, add_SandboxServiceServicer_to_server
from services.sandbox.adapters.native.backend import open_native
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from services.sandbox.server import SandboxServicer

if TYPE_CHECKING:
    from muster.v1.sandbox_pb2_grpc import SandboxServiceAsyncStub

_WAIT_S = 120.0
_BASH = "echo hello"
_PYTHON = "python3 -c 'print(1)'"
_VERIFY = "echo 1 > /tmp/reward.txt"
# What is measured, and the command whose bare run stands against it.
_CONTROLS = {"start": "true", "step_bash": _BASH, "step_python": _PYTHON, "verify": _VERIFY}
_STEPS = ("step_bash", "step_python")  # these stand against a bare exec without a layer as well
_OPERATIONS = (*_CONTROLS, "end")

Times = dict[str, list[float]]


def _task() -> common_pb2.TaskPackage:
    texts = {
        "instruction.md": "Nothing.",
        "environment/Dockerfile": "FROM scratch\nWORKDIR /app\n",
        "tests/test.sh": _VERIFY.replace("/tmp", "/logs/verifier"),
    }
    archive = pack_files({path: TaskFile(0o644, text.encode()) for path, text in texts.items()})
    digest = hashlib.sha256(archive).hexdigest()
    return common_pb2.TaskPackage(name="bench", digest=digest, archive=archive)


class Boxes:
    """The arm under test."""

    def __init__(self, stub: SandboxServiceAsyncStub):
        self._stub, self._task, self._count = stub, _task(), 0

    async def batch(self, at_once: int, times: Times) -> None:
        """`at_once` boxes through their whole life, all in the same operation at any time."""
        episodes = []
        for _ in range(at_once):
            self._count += 1
            episodes.append(codec.key_to_pb(EpisodeKey("bench", f"g-{self._count:05d}", 0, 0, 1)))
        boxes: dict[str, str] = {}

        async def start(episode: common_pb2.EpisodeKey) -> None:
            asking = pb.AcquireBoxRequest(episode=episode, task=self._task)
            boxes[episode.group] = (await self._stub.AcquireBox(asking, timeout=_WAIT_S)).box

        def step(turn: int, command: str) -> Callable[[common_pb2.EpisodeKey], Awaitable[None]]:
            async def run(episode: common_pb2.EpisodeKey) -> None:
                asking = pb.ExecRequest(
                    episode=episode,
                    box=boxes[episode.group],
                    turn=turn,
                    command=command,
                    timeout_s=60,
                )
                answer = await self._stub.Exec(asking, timeout=_WAIT_S)
                if answer.exit_code or answer.limit != pb.STEP_LIMIT_NONE:
                    raise SystemExit(f"{command}: {answer}")

            return run

        async def verify(episode: common_pb2.EpisodeKey) -> None:
            asking = pb.VerifyRequest(episode=episode, box=boxes[episode.group])
            answer = await self._stub.Verify(asking, timeout=_WAIT_S)
            if answer.reward != 1.0:
                raise SystemExit(f"verify: {answer}")

        async def end(episode: common_pb2.EpisodeKey) -> None:
            asking = pb.ReleaseBoxRequest(episode=episode, box=boxes[episode.group])
            await self._stub.ReleaseBox(asking, timeout=_WAIT_S)

        calls = (start, step(0, _BASH), step(1, _PYTHON), verify, end)
        for name, call in zip(_OPERATIONS, calls, strict=True):
            times[name] += await _all(call, episodes)


async def _all(
    call: Callable[[common_pb2.EpisodeKey], Awaitable[None]],
    episodes: list[common_pb2.EpisodeKey],
) -> list[float]:
    """Milliseconds from the beginning of the batch to the end of each call."""
    began, took = monotonic(), []

    async def one(episode: common_pb2.EpisodeKey) -> None:
        await call(episode)
        took.append((monotonic() - began) * 1000)

    async with asyncio.TaskGroup() as tasks:
        for episode in episodes:
            tasks.create_task(one(episode))
    return took


class Bare:
    """The control, in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench._bare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._read() != "ready\n":
            raise SystemExit("the control did not start")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def batch(self, at_once: int, times: Times) -> None:
        """The commands of one batch of boxes, each in a fresh layer."""
        for name, command in _CONTROLS.items():
            times[name] += self._ask({"command": command, "at_once": at_once, "layer": True})
        for name in _STEPS:
            asked = {"command": _CONTROLS[name], "at_once": at_once, "layer": False}
            times[f"exec_{name}"] += self._ask(asked)

    def _ask(self, request: dict[str, Any]) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        took: list[float] = json.loads(self._read())
        return took

    def close(self) -> None:
        """It ends with its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


async def _measure(rounds: int, alone: int, at_once: int) -> dict[tuple[str, int], Times]:
    """(arm, boxes at once) → operation → milliseconds."""
    found: dict[tuple[str, int], Times] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        async with (
            open_native(Path(folder) / "run") as backend,
            SandboxHost(backend, SandboxConfig(boxes_max=at_once), "bench") as host,
            rpc.serve(
                "127.0.0.1:0", [(add_SandboxServiceServicer_to_server, SandboxServicer(host))]
            ) as server,
            rpc.channel(server.address) as channel,
        ):
            boxes, bare = Boxes(SandboxServiceStub(channel)), Bare()
            await boxes.batch(1, defaultdict(list))  # imports and caches
            await asyncio.to_thread(bare.batch, 1, defaultdict(list))
            for _ in range(rounds):
                for number in range(alone):
                    arms = ("boxes", "bare") if number % 2 else ("bare", "boxes")
                    for arm in arms:
                        await _batch(boxes, bare, arm, 1, found)
                for arm in ("boxes", "bare"):
                    await _batch(boxes, bare, arm, at_once, found)
            await asyncio.to_thread(bare.close)
    return found


async def _batch(
    boxes: Boxes, bare: Bare, arm: str, at_once: int, found: dict[tuple[str, int], Times]
) -> None:
    if arm == "boxes":
        await boxes.batch(at_once, found[arm, at_once])
    else:
        await asyncio.to_thread(bare.batch, at_once, found[arm, at_once])


def main() -> None:
    asked = _results.arguments(__doc__ or "")
    rounds, alone, at_once = (2, 15, 16) if asked.quick else (5, 100, 32)
    result: dict[str, Any] = {
        "name": "sandbox",
        "machine": _results.machine(),
        "settings": {
            "quick": asked.quick,
            "rounds": rounds,
            "boxes_alone_per_round": alone,
            "boxes_at_once": at_once,
        },
        "figures": {},
        "ratios": {},
    }
    found = asyncio.run(_measure(rounds, alone, at_once))
    for load, name in ((1, "alone"), (at_once, "at_once")):
        for q, label in ((0.5, "p50"), (0.99, "p99")):
            _compare(found["boxes", load], found["bare", load], q, f"{name}_{label}", result)
    _results.publish(result, asked.json)


def _compare(boxes: Times, bare: Times, q: float, label: str, result: dict[str, Any]) -> None:
    """Each operation's figure, those of its controls, and their ratios."""
    for operation in _OPERATIONS:
        ours = _results.quantile(boxes[operation], q)
        result["figures"][f"{operation}_{label}_ms"] = round(ours, 3)
        for control, prefix in ((operation, "bare"), (f"exec_{operation}", "bare_exec")):
            if control in bare:
                theirs = _results.quantile(bare[control], q)
                result["figures"][f"{prefix}_{operation}_{label}_ms"] = round(theirs, 3)
                result["ratios"][f"{operation}_over_{prefix}_{label}"] = round(ours / theirs, 3)


if __name__ == "__main__":
    main()
