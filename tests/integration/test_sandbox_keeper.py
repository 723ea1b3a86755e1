"""The keeper dies, hangs or is busy: nothing of that is ever told as the agent's doing."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from muster.archive import TaskFile, pack_files
from muster.errors import NotFound, Unavailable
from muster.types import EpisodeKey, Limits
from services.sandbox.adapters.native.backend import NativeBackend, open_native
from services.sandbox.adapters.native.client import Patience
from services.sandbox.box import BoxFailure, JudgeSpec, PutFile
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
KEY = EpisodeKey("run", "g", 0, 1, 1)
UNSET = Limits(0, 0, 0, 0, 0)
GONE = "keeper of the boxes has gone"


def kill(pid: int, number: int) -> None:
    os.kill(pid, number)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def package() -> dict[str, Any]:
    texts = {
        "instruction.md": b"Wait.",
        "environment/Dockerfile": b"FROM scratch\n",
        "tests/test.sh": b"true",
    }
    archive = pack_files({path: TaskFile(0o644, text) for path, text in texts.items()})
    return {"name": "t", "digest": hashlib.sha256(archive).hexdigest(), "archive": archive}


async def first_child(pid: int) -> int:
    while True:
        if found := children(pid):
            return found[0]
        await asyncio.to_thread(time.sleep, 0.01)


@pytest.fixture(autouse=True)
async def swept(tmp_path: Path) -> AsyncIterator[None]:
    """A killed keeper leaves empty groups, for a successor in the same folder to remove."""
    yield
    async with open_native(tmp_path / "run"):
        pass


@asynccontextmanager
async def opened(folder: Path, patience: Patience | None = None) -> AsyncIterator[NativeBackend]:
    async with asyncio.timeout(60), open_native(folder / "run", patience=patience) as backend:
        await backend.start("a", Limits())
        await backend.set_session("a", "/app", dict(ENV))
        yield backend


async def lost(
    call: Awaitable[object], error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    """The caller of something that goes down with the host."""
    with pytest.raises(error):
        await call


async def test_a_keeper_killed_during_a_step_loses_the_step_and_ends_the_host(
    tmp_path: Path,
) -> None:
    async def block(callers: asyncio.TaskGroup) -> None:
        async with opened(tmp_path) as backend:
            callers.create_task(lost(backend.run("a", "sleep 50", 100), BoxFailure))
            await backend.start("b", Limits())  # by its end, the step has begun
            kill(backend.keeper_pid, signal.SIGKILL)
            await asyncio.sleep(50)

    async with asyncio.TaskGroup() as callers:
        with pytest.raises(Unavailable, match=GONE):
            await block(callers)


async def test_a_keeper_killed_between_steps_ends_the_host(tmp_path: Path) -> None:
    async def block() -> None:
        async with opened(tmp_path) as backend:
            await backend.run("a", "true", 10)
            kill(backend.keeper_pid, signal.SIGKILL)
            await asyncio.sleep(50)

    with pytest.raises(Unavailable, match=GONE):
        await block()
    async with opened(tmp_path) as again:  # it sweeps, and goes on
        assert (await again.run("a", "exit 3", 10)).exit_code == 3


async def test_callers_of_a_host_whose_keeper_dies_hear_unavailable(tmp_path: Path) -> None:
    async def block(callers: asyncio.TaskGroup) -> None:
        async with (
            opened(tmp_path) as backend,
            SandboxHost(backend, SandboxConfig(), "host") as host,
        ):
            box = (await host.acquire(KEY, **package(), asked=UNSET, wait_s=20)).box
            step = host.execute(KEY, box, 0, "sleep 50", 100)
            # The end of the box may be heard before that of its keeper: then the box is lost.
            callers.create_task(lost(step, (Unavailable, NotFound)))
            await asyncio.sleep(0)
            kill(backend.keeper_pid, signal.SIGKILL)
            await asyncio.sleep(50)

    async with asyncio.TaskGroup() as callers:
        with pytest.raises(Unavailable, match=GONE):
            await block(callers)


async def test_a_keeper_that_hangs_ends_the_host(tmp_path: Path) -> None:
    async def block() -> None:
        async with opened(tmp_path, Patience(answer_s=0.5)) as backend:
            kill(backend.keeper_pid, signal.SIGSTOP)
            await backend.start("b", Limits())

    with pytest.raises(Unavailable, match="no answer to 'start'"):
        await block()


async def test_a_request_that_waits_too_long_for_its_turn_fails_alone(tmp_path: Path) -> None:
    async with opened(tmp_path, Patience(turn_s=0.2)) as backend:
        kill(backend.keeper_pid, signal.SIGSTOP)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(backend.start("b", Limits()))
            await asyncio.sleep(0)
            with pytest.raises(BoxFailure, match="busy"):
                await backend.seal("a")
            kill(backend.keeper_pid, signal.SIGCONT)
            await first
        # The late request was never sent: the box still takes steps, and so does the other.
        assert (await backend.run("a", "exit 3", 10)).exit_code == 3
        await backend.end("b")


async def test_a_request_whose_caller_left_is_carried_through(tmp_path: Path) -> None:
    async with opened(tmp_path) as backend:
        kill(backend.keeper_pid, signal.SIGSTOP)
        async with asyncio.TaskGroup() as tasks:
            left = tasks.create_task(backend.start("b", Limits()))
            await asyncio.sleep(0.05)
            left.cancel()
            await asyncio.sleep(0.05)
            kill(backend.keeper_pid, signal.SIGCONT)
        assert await backend.end("b") is False  # begun, and ended on the way out
        assert (await backend.run("a", "exit 3", 10)).exit_code == 3


async def test_many_boxes_start_and_end_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as backend:
        for _ in range(2):
            async with asyncio.TaskGroup() as tasks:
                for number in range(64):
                    tasks.create_task(backend.start(f"b{number}", Limits()))
            async with asyncio.TaskGroup() as tasks:
                ends = [tasks.create_task(backend.end(f"b{number}")) for number in range(64)]
            assert all(end.result() for end in ends)


async def test_a_killed_pid_1_is_the_host_s_loss_and_spares_the_other_boxes(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as backend:
        (first,) = children(backend.keeper_pid)
        await backend.start("b", Limits())
        kill(first, signal.SIGKILL)
        with pytest.raises(BoxFailure):
            await backend.run("a", "true", 10)
        await backend.set_session("b", "/", dict(ENV))
        assert (await backend.run("b", "exit 3", 10)).exit_code == 3
        assert await backend.end("a") is True


async def test_variables_too_long_for_the_kernel_are_the_agent_s_doing(tmp_path: Path) -> None:
    async with opened(tmp_path) as backend:
        long = "head -c 200000 /dev/zero | tr '\\0' x"
        # More than the shell itself would leave to the next step: the agent writes its state.
        state = f"{{ printf '/app\\0BIG='; {long}; printf '\\0'; }} > /run/muster/state"
        await backend.run("a", f"trap - EXIT; {state}", 10)
        found = await backend.run("a", "true", 10)
        assert "too long" in found.broken


async def test_a_verifier_lost_with_its_pid_1_leaves_the_sealed_files(tmp_path: Path) -> None:
    async with opened(tmp_path) as backend:
        await backend.run("a", "echo 1 > /app/answer", 10)
        await backend.seal("a")
        script = PutFile(
            "/tests/test.sh", 0o755, b"cat answer > /logs/verifier/reward.txt; sleep $S"
        )

        def spec(seconds: str) -> JudgeSpec:
            env = ENV | {"S": seconds}
            return JudgeSpec((script,), "/tests/test.sh", "/app", env, 60, Limits())

        async with asyncio.TaskGroup() as tasks:

            async def judge() -> None:
                with pytest.raises(BoxFailure):
                    await backend.judge("a", spec("50"))

            judging = tasks.create_task(judge())
            kill(await first_child(backend.keeper_pid), signal.SIGKILL)
            await judging
        assert (await backend.judge("a", spec("0"))).files == {"reward.txt": b"1\n"}
