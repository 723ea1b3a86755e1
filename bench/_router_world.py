"""What bench.router and bench.router_soak run on: a server of streams, the router's process, fakes.

Owns: the processes, which end with the context; what is read of them (processor time, the router's
own log and journal). Promise: the router is the shipped service under its shipped defaults, but
for the sizes that a bench needs. Does not cover: the figures (router.py, router_soak.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from bench import _bank_world as world
from muster.client import MusterClient
from muster.clock import monotonic
from muster.model import ensure_model
from muster.registry import Registry
from muster.types import Value

RUN = world.RUN
ROOT = Path(__file__).parents[1]
_PATIENCE_S = 600.0
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_TASK_TOML = """
[task]
name = "bench/{name}"
description = "A long note"
[metadata]
muster_max_turns = {turns}
[verifier]
timeout_sec = 10.0
[environment]
network_mode = "no-network"
"""


class Fakes(Value, frozen=True):
    """How many they are and what they say."""

    replicas: int = 8
    hosts: int = 4
    think_ms: float = 50.0
    reply_tokens: int = 214
    output_bytes: int = 1800  # about 870 tokens


class World:
    """A running router and what is around it."""

    def __init__(
        self, folder: Path, redis: Redis, url: str, client: MusterClient, pids: Mapping[str, int]
    ):
        self.folder, self.redis, self.url = folder, redis, url
        self.client, self.pids = client, pids
        self.log = folder / "router.log"
        self.journals = folder / "state" / "journal"

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds of each process so far."""
        return {name: cpu_s(pid) for name, pid in self.pids.items()}

    def turns_at(self) -> list[float]:
        """When each turn was durable, by the router's journal; seconds of monotonic()."""
        return [now for now, kind in self.journal() if kind == "TurnRecorded"]

    def journal(self) -> Iterator[tuple[float, str]]:
        """(seconds of monotonic(), type) of every event that the router handled."""
        for path in sorted(self.journals.glob("router-*.jsonl")):
            with path.open("rb") as file:
                for line in file:
                    if found := _EVENT.search(line):
                        yield float(found[1]), found[2].decode()

    def lags(self) -> list[dict[str, Any]]:
        """What the router has told of its event loop, one entry a window, oldest first."""
        lines = self.log.read_text("utf-8").splitlines()
        told = (json.loads(line) for line in lines if '"muster.lag"' in line)
        return [line for line in told if line["logger"] == "muster.lag"]


_EVENT = re.compile(rb'^\{"now":([0-9.e+-]+),"event":\{"type":"(\w+)"')
_OF_EPISODE = re.compile(
    rb'^\{"now":[0-9.e+-]+,"event":\{"type":"(BoxAcquired|TurnRecorded)","episode":(\{[^}]*\})'
)


class FirstTurns:
    """Which of the first episodes of a journal have had a turn. Reads on where it stopped."""

    def __init__(self, folder: Path, episodes: int):
        """folder: the router's journals. episodes: so many of those that got a box first."""
        self._folder, self._episodes = folder, episodes
        self._read: dict[Path, int] = {}  # bytes of whole lines
        self._first: set[bytes] = set()
        self._turned: set[bytes] = set()

    def all(self) -> bool:
        """True once so many got a box and each of them has a durable turn."""
        for path in sorted(self._folder.glob("router-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    self._read[path] = self._read.get(path, 0) + len(line)
                    self._saw(line)
        return len(self._first) == self._episodes and self._first <= self._turned

    def _saw(self, line: bytes) -> None:
        found = _OF_EPISODE.search(line)
        if found is None:
            return
        if found[1] == b"TurnRecorded":
            self._turned.add(found[2])
        elif len(self._first) < self._episodes:
            self._first.add(found[2])


def cpu_s(pid: int) -> float:
    """User and system time of a process, in seconds. Raises SystemExit when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    except OSError:
        raise SystemExit(f"process {pid} has ended before its time") from None
    return (int(fields[11]) + int(fields[12])) * _TICK_S


@asynccontextmanager
async def router(folder: Path, config: str, fakes: Fakes) -> AsyncIterator[World]:
    """Everything started and announced. `config`: TOML of the router, `[redis]` left out."""
    model = ensure_model(os.environ.get("MUSTER_TEST_MODEL", "smollm2-135m-instruct"), _cache())
    async with world.server(folder, "everysec") as (redis, url):
        path = folder / "router.toml"
        head = f'run = "{RUN}"\nstate_dir = "{folder}/state"\n'
        tail = f'[redis]\nurl = "{url}"\n[model]\npath = "{model}"\n'
        path.write_text(f"{head}{config}\n{tail}", "utf-8")
        python = sys.executable
        asked = ["--redis", url, "--run", RUN, "--model", str(model)]
        for name in Fakes.__struct_fields__:
            asked += [f"--{name.replace('_', '-')}", str(getattr(fakes, name))]
        with ExitStack() as stack:
            log = stack.enter_context((folder / "router.log").open("wb"))
            noise = stack.enter_context((folder / "fakes.log").open("wb"))
            command = [python, "-m", "bench._router_fakes", *asked]
            other = stack.enter_context(world.ended(world.start(command, stderr=noise.fileno())))
            await _listed(redis, {"inference": fakes.replicas, "sandbox": fakes.hosts}, other)
            command = [python, "-m", "services.router", "--config", str(path)]
            main = stack.enter_context(world.ended(world.start(command, stderr=log.fileno())))
            address = (await _listed(redis, {"router": 1}, main))["router"]
            server = int((await redis.info("server"))["process_id"])
            pids = {"router": main.pid, "fakes": other.pid, "redis": server}
            # Under load an answer takes as long as all that were asked before: minutes.
            async with MusterClient(address, patience_s=_PATIENCE_S) as client:
                yield World(folder, redis, url, client, pids)


async def _listed(redis: Redis, wanted: Mapping[str, int], process: object) -> dict[str, str]:
    """An address of each kind, once so many are announced. Raises SystemExit when one ends."""
    registry, began = Registry(redis, RUN), monotonic()
    while True:
        found = {kind: await registry.list(kind) for kind in wanted}
        if all(len(found[kind]) >= count for kind, count in wanted.items()):
            return {kind: entries[-1].address for kind, entries in found.items()}
        if process.poll() is not None:  # type: ignore[attr-defined]
            raise SystemExit(f"a process of the bench has ended: {wanted}")
        if monotonic() - began > world.DEADLINE_S:
            raise SystemExit(f"not announced within {world.DEADLINE_S:g} s: {wanted}")
        await asyncio.sleep(0.1)


def _cache() -> Path:
    return Path(os.environ.get("MUSTER_CACHE", str(ROOT / ".muster" / "cache")))


def tasks(folder: Path, count: int, *, tokens: int, turns: int) -> Path:
    """A task set whose instructions have about so many tokens: digits, one token each."""
    for number in range(count):
        task = folder / f"note-{number}"
        (task / "tests").mkdir(parents=True)
        chance = random.Random(number)
        digits = "".join(chance.choice("0123456789") for _ in range(max(1, tokens)))
        (task / "instruction.md").write_text(digits, "utf-8")
        (task / "task.toml").write_text(_TASK_TOML.format(name=task.name, turns=turns), "utf-8")
        (task / "tests" / "test.sh").write_text("exit 0\n", "utf-8")
        (task / "environment").mkdir()
        (task / "environment" / "Dockerfile").write_text("FROM scratch\n", "utf-8")
    return folder
