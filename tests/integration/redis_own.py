"""A server that one test owns, started as the embedded one is, and the troubles it can be given."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from muster.config import RedisConfig
from muster.supervise import server_log
from muster.supervise.plan import server_binary, server_options


class OwnServer:
    """One process with its data in `folder`; `admin` has no short limits."""

    def __init__(self, folder: Path, **settings: object):
        self.folder = folder
        self.socket, self.log = folder / "s", folder / "redis.log"
        self.config = RedisConfig(url=f"unix://{self.socket}", timeout_s=0.3, **settings)
        self.admin: Any = Redis(unix_socket_path=str(self.socket))
        self._process: subprocess.Popen[bytes] | None = None
        self.log_start = 0

    def launch(self, *more: str) -> None:
        """Start; does not wait."""
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.socket.unlink(missing_ok=True)
        options = server_options(self.config, self.folder, str(self.socket))
        with self.log.open("ab") as log:
            # A write over the limit of its file sizes shall fail, not kill.
            former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            self._process = subprocess.Popen(
                [server_binary(), *options, *more],
                stdout=log,
                stderr=log,
                process_group=0,
                restore_signals=False,
            )
            signal.signal(signal.SIGXFSZ, former)

    async def start(self, *more: str) -> None:
        """Start, and wait until it answers."""
        self.launch(*more)
        await self.answers()

    async def answers(self) -> None:
        async with asyncio.timeout(30):
            while True:
                assert self.process.poll() is None, self.log.read_text()
                try:
                    await self.admin.ping()
                    return
                except (RedisError, OSError):
                    await asyncio.sleep(0.01)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def kill(self) -> None:
        """SIGKILL, as a power cut of the process; what it has written stays."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def files(self) -> list[Path]:
        """The append-only files, the one that grows last."""
        return sorted((self.folder / "appendonlydir").glob("*.aof"))

    def limit_files(self, size: int) -> None:
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def verdict(self) -> str:
        return server_log.verdict(
            self.log, self.log_start, data=self.folder, server=server_binary()
        )


Trouble = Callable[[OwnServer], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def full(server: OwnServer) -> AsyncIterator[None]:
    await server.admin.config_set("maxmemory", "1")
    yield
    await server.admin.config_set("maxmemory", "0")


@asynccontextmanager
async def away(server: OwnServer) -> AsyncIterator[None]:
    server.kill()
    yield
    await server.start()


def _listens(path: Path) -> bool:
    """The file is there a moment before anybody can connect to it."""
    with socket.socket(socket.AF_UNIX) as line:
        return line.connect_ex(str(path)) == 0


@asynccontextmanager
async def loading(server: OwnServer) -> AsyncIterator[None]:
    async with server.admin.pipeline(transaction=False) as pipe:
        for number in range(20_000):
            pipe.set(f"ballast:{number}", "x")
        await pipe.execute()
    server.kill()
    server.launch("--key-load-delay", "50")  # microseconds for each key
    async with asyncio.timeout(30):
        while True:
            if _listens(server.socket):
                break
            await asyncio.sleep(0.001)
    yield
    await server.answers()


@asynccontextmanager
async def replica(server: OwnServer) -> AsyncIterator[None]:
    await server.admin.execute_command("REPLICAOF", "127.0.0.1", "1")
    yield
    await server.admin.execute_command("REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def paused(server: OwnServer) -> AsyncIterator[None]:
    """Writes wait, and are done once it goes on, though their callers have left."""
    await server.admin.client_pause(60_000, all=False)
    yield
    await server.admin.client_unpause()


@asynccontextmanager
async def stopped(server: OwnServer) -> AsyncIterator[None]:
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    await server.answers()


@asynccontextmanager
async def disk_full(server: OwnServer) -> AsyncIterator[None]:
    """As far as the server can tell: its file may not grow any more."""
    server.limit_files(server.files()[-1].stat().st_size)
    # The first write is still taken: with everysec the file is written after the answer.
    await server.admin.set("ballast", "x")
    yield
    server.limit_files(resource.RLIM_INFINITY)


@asynccontextmanager
async def cut(server: OwnServer) -> AsyncIterator[None]:
    """Every connection is dropped, again and again."""

    over = asyncio.Event()  # cancelling the task is no way: redis-py may lose that

    async def drop() -> None:
        while not over.is_set():
            await server.admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(drop())
        yield
        over.set()


@asynccontextmanager
async def forgotten(server: OwnServer) -> AsyncIterator[None]:
    await server.admin.script_flush()
    yield
