"""The router in charge is stopped for a while: its standby finishes the run, and it is refused.

All processes are real, started by `muster up --standby`; engine, boxes and policy are the fakes
that ship beside the real ones. MUSTER_TEST_STOPPED_S: how long it is stopped (default 5).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from muster.client import JobState, MusterClient, Progress
from muster.config import Config
from muster.model import ensure_model
from muster.supervise import state
from muster.supervise.plan import redis_url
from muster.supervise.prepare import cache_dir

ROOT = Path(__file__).parents[2]
MUSTER = str(Path(sys.executable).with_name("muster"))
STOPPED_S = float(os.environ.get("MUSTER_TEST_STOPPED_S", "5"))
WAIT_S = 180.0  # for anything; on an idle machine all is there within seconds
pytestmark = pytest.mark.timeout(600 + STOPPED_S)
CONFIG = """
groups_per_batch = 2
repairs_max = 4
state_dir = "{state}"
[model]
path = "{model}"
[router]
listen = "127.0.0.1:0"
lag_max = 1
[readybank]
listen = "127.0.0.1:0"
[trainer]
policy = "fake"
transport = "none"
checkpoints_kept = 1
[inference]
engine = "fake"
follow_versions = true
[sandbox]
backend = "fake"
"""


class Up:
    """A running `muster up --standby`."""

    def __init__(self, folder: Path):
        self.state, self.config = folder / "state", folder / "muster.toml"
        model = ensure_model("smollm2-135m-instruct", cache_dir())
        self.config.write_text(CONFIG.format(state=self.state, model=model))
        self.lines: list[dict[str, Any]] = []
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until it is stopped; feeds `until`."""
        command = ("up", "--standby", "--json", "--config", str(self.config))
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(MUSTER, *command, stdout=pipe, cwd=ROOT)
        assert self.process.stdout is not None
        try:
            async for line in self.process.stdout:
                self.lines.append(json.loads(line))
                self._changed.set()
        finally:
            await self.process.communicate()  # else its pipes are closed by chance

    async def until(self, wanted: Callable[[list[dict[str, Any]]], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not wanted(self.lines):
                self._changed.clear()
                await self._changed.wait()

    def pid(self, service: str) -> int:
        holding = state.read(self.state)
        assert holding is not None
        process = holding.children[service].process
        assert process is not None
        return process.pid

    def said(self, service: str, word: str) -> Callable[[list[dict[str, Any]]], bool]:
        """True when the supervisor has told that of a service."""
        return lambda lines: any(
            line.get("service") == service and word in line.get("detail", "") for line in lines
        )


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Up]:
    made = Up(folder)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(made.run())
        try:
            await made.until(lambda lines: any("ready: " in x.get("text", "") for x in lines))
            yield made
        finally:
            made.process.send_signal(signal.SIGINT)


class Following:
    """A watch, and what it has seen."""

    def __init__(self) -> None:
        self.seen: list[Progress] = []
        self._changed = asyncio.Event()

    async def run(self, client: MusterClient, job: str) -> None:
        async for progress in client.watch(job):
            self.seen.append(progress)
            self._changed.set()

    async def turns(self, number: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.seen or self.seen[-1].turns < number:
                self._changed.clear()
                await self._changed.wait()


def finder(up: Up) -> MusterClient:
    return MusterClient(find=lambda: state.router_address(up.state), patience_s=60)


async def fenced(up: Up) -> int:
    url = redis_url(Config(), state.runtime_dir(up.state))
    async with Redis.from_url(url) as redis:
        return int(await redis.get("m:{main}:epoch:router:fenced") or 0)


async def test_a_router_that_was_stopped_is_refused_while_its_standby_works(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    following = Following()
    async with running(tmp_path) as up, finder(up) as client, asyncio.TaskGroup() as tasks:
        job = await client.submit(ROOT / "tasks", groups=40, group_size=4)
        watching = tasks.create_task(following.run(client, job))
        await following.turns(6)
        former = up.pid("router")
        os.kill(former, signal.SIGSTOP)
        await up.until(up.said("router-2", "leads now"))
        await asyncio.sleep(STOPPED_S)  # what is tested: the length of the silence
        os.kill(former, signal.SIGCONT)
        await up.until(up.said("router", "a newer router"))
        await up.until(up.said("router", "stands by"))
        await watching
        record_property("late_writes_refused", await fenced(up))
        assert await fenced(up) > 0
    assert following.seen[-1].state is JobState.DONE
    await audited(up)


async def test_a_killed_router_is_not_noticed_by_who_watches(tmp_path: Path) -> None:
    following = Following()
    async with running(tmp_path) as up, finder(up) as client, asyncio.TaskGroup() as tasks:
        job = await client.submit(ROOT / "tasks", groups=8, group_size=4)
        watching = tasks.create_task(following.run(client, job))
        await following.turns(6)
        os.kill(up.pid("router"), signal.SIGKILL)
        await up.until(up.said("router-2", "leads now"))
        await watching
    assert following.seen[-1].state is JobState.DONE
    await audited(up)


async def audited(up: Up) -> None:
    command = [MUSTER, "audit", "--json", "--state-dir", str(up.state)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
