"""A sandbox service that is killed and started again, and what it leaves on the machine.

Owns: the service's process, a channel to the living one, and the Redis that it announces in.
Promise: a caller that waits for `living` gets a stub of the newest process. Does not cover: what
is asked of it (box_soak.py).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from bench import _bank_world as world
from muster import rpc
from muster.clock import monotonic
from muster.errors import MusterError, Unavailable
from muster.v1 import sandbox_pb2 as pb
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub
from services.sandbox.adapters.native.backend import instance_of

START_S = 60.0
_STOP_S = 60.0
_CONFIG = """
run = "{run}"
state_dir = "{folder}/state"
[redis]
url = "{url}"
[telemetry]
log_level = "ERROR"
traces = false
[sandbox]
listen = "unix:{folder}/host"
runtime_dir = "{folder}/boxes"
boxes_max = {boxes_max}
warm_max = 4
"""


class Host:
    """One instance, through all its processes."""

    def __init__(self, folder: Path):
        self.folder, self.boxes = folder, folder / "boxes"
        self.process: subprocess.Popen[Any] | None = None
        self.starts = 0
        self._command = [sys.executable, "-m", "services.sandbox", "--config"]
        self._command.append(str(folder / "soak.toml"))
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._answers = asyncio.Event()

    async def start(self) -> None:
        """A process that does not answer yet."""
        self.process = await asyncio.to_thread(world.start, self._command)
        self.starts += 1

    async def reach(self) -> float:
        """Wait until the process answers; for how many seconds that was."""
        assert self.process
        began = monotonic()
        await self._close()
        while True:
            channel = rpc.open_channel(f"unix:{self.folder}/host")
            stub: Any = SandboxServiceStub(channel)
            try:
                with rpc.calling("status"):
                    await stub.GetHostStatus(pb.GetHostStatusRequest(), timeout=2)
            except MusterError as failure:
                await channel.close()
                if self.process.poll() is not None or monotonic() - began > START_S:
                    status = self.process.poll()
                    raise Unavailable(f"no answer of the service (status {status})") from failure
                await asyncio.sleep(0.05)
            else:
                self._channel, self._stub = channel, stub
                self._answers.set()
                return monotonic() - began

    async def _close(self) -> None:
        self._answers.clear()
        if self._channel:
            await self._channel.close()
        self._channel = None

    async def living(self) -> Any:
        """The stub of the newest process."""
        async with asyncio.timeout(START_S):
            await self._answers.wait()
        return self._stub

    async def kill(self) -> None:
        """SIGKILL, without a word to its callers."""
        assert self.process
        self._answers.clear()
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    async def stop(self) -> int:
        """SIGTERM; its exit status."""
        assert self.process
        await self._close()
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, _STOP_S)

    def rss_kib(self) -> tuple[int, int]:
        """Resident memory of the service, once it answers, and of the keeper; else 0."""
        answers = self.process is not None and self._answers.is_set()
        service = _rss(self.process.pid) if self.process and answers else 0
        return service, sum(_rss(int(line.split()[0])) for line in self._keepers())

    def _keepers(self) -> list[str]:
        return [line for line in self.traces()["processes"] if line.endswith("muster-keeper")]

    def traces(self) -> dict[str, list[str]]:
        """What there is of its boxes anywhere on the machine, by kind."""
        group = f"/muster-{instance_of(self.boxes)}"
        mounts, processes = [], []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                name = (path / "comm").read_text("utf-8").strip()
                if group in (path / "cgroup").read_text("utf-8") or (
                    name == "muster-keeper"
                    and str(self.boxes).encode() in (path / "cmdline").read_bytes()
                ):
                    processes.append(f"{path.name} {name}")
                lines = (path / "mountinfo").read_text("utf-8").splitlines()
            except OSError:
                continue  # it has ended
            mounts += [line for line in lines if str(self.boxes) in line]
        groups = [path for path, _, _ in os.walk("/sys/fs/cgroup") if group in path]
        files = [str(file) for file in self.boxes.rglob("*") if file.name != "host_id"]
        return {"processes": processes, "mounts": mounts, "groups": groups, "files": files}


def _rss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)


@asynccontextmanager
async def host(folder: Path, boxes_max: int) -> AsyncIterator[Host]:
    """One that serves; killed with the block if it still does."""
    async with world.server(folder, "everysec") as (_, url):
        text = _CONFIG.format(run=world.RUN, folder=folder, url=url, boxes_max=boxes_max)
        (folder / "soak.toml").write_text(text, "utf-8")
        found = Host(folder)
        await found.start()
        try:
            await found.reach()
            yield found
        finally:
            await found._close()
            if found.process and found.process.poll() is None:
                await found.kill()
