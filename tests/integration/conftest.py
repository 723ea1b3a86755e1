"""A real, durable Redis-compatible server per test session, and a fresh run per test."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as NotThere

from muster.config import RedisConfig
from muster.streams import connect
from muster.supervise.plan import server_binary

_runs = itertools.count()


class RedisServer:
    """One server process in its own process group, with an append-only file in `folder`."""

    def __init__(self, folder: Path):
        self.folder, self.url = folder, f"unix://{folder}/redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        socket = self.folder / "redis.sock"
        options = {
            "--port": "0",
            "--unixsocket": str(socket),
            "--dir": str(self.folder),
            "--appendonly": "yes",
            "--save": "",
            "--logfile": str(self.folder / "log"),
        }
        self._process = subprocess.Popen(
            [server_binary(), *(part for pair in options.items() for part in pair)],
            process_group=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                with BlockingRedis(unix_socket_path=str(socket)) as client:
                    client.ping()
                return
            except NotThere:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL; what it has written to its file stays."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Shared by the session; use `run` to keep out of each other's way."""
    # A short path: a Unix socket's may have 107 bytes.
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that the test starts, kills and starts again."""
    server = RedisServer(tmp_path_factory.mktemp("own"))
    yield server
    server.kill()


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    """A connected client."""
    async with connect(RedisConfig(url=redis_server.url)) as client:
        yield client


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """For configuration files of processes."""
    return redis_server.url


@pytest.fixture
def run() -> str:
    """A run name that no other test of this session has."""
    return f"run-{next(_runs)}"
