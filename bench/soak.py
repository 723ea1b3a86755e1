"""Does anything grow? A long run of real processes around a policy, an engine and boxes that do
nothing, at no latency.

    python -m bench.soak [--batches 1000] [--json PATH|-] [--keep DIR]

`muster up` starts router, bank, trainer, engine and sandbox host (the last three as their shipped
fakes) and a real server of streams. Batches are two groups of two siblings. Five times a second
each process's memory, descriptors and threads are read, and the server's memory, keys and streams.
The figure of batch k is the median of what was read during the 50 batches before it. Memory fails
the run when that of the last batch is above 1.05 times that of batch 50, by more than 1 MiB for a
process (the server has 8). What is counted goes up and down with what is open, and holds all that
is kept by design (open groups, pooled connections) only some time after batch 50: it fails
the run when even the lowest reading of the last 300 batches is above 1.05 times the median of
batches 201 to 300, by more than two.
Does not cover: speed (the fakes have none), the disk (history and journals grow by design: how
much is told), real engines and boxes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from bench import _results
from muster.attach import attached
from muster.client import MusterClient
from muster.clock import monotonic
from muster.config import Config, load_config
from muster.errors import MusterError, Unavailable
from muster.registry import Registry
from muster.rpc import calling, channel
from muster.streams import STREAMS, RunStreams
from muster.supervise import state
from muster.types import JobPolicy
from muster.v1 import trainer_pb2 as pb
from muster.v1.trainer_pb2_grpc import TrainerServiceStub

ROOT = Path(__file__).parents[1]
EVERY, GROUPS, SIBLINGS = 50, 2, 2
RATIO_MAX, POOLED = 1.05, 2.0
SETTLED, LAST, BATCHES_MIN = (200, 300), 300, 600
STALL_S = 120.0
_POLL_S = 0.2
_CONFIG = """
run = "soak"
groups_per_batch = {groups}
[model]
path = "{model}"
[telemetry]
log_level = "WARNING"
traces = false
[router]
listen = "127.0.0.1:0"
lag_max = 1
[inference]
engine = "fake"
follow_versions = true
[sandbox]
backend = "fake"
[trainer]
policy = "fake"
transport = "none"
"""

Reading = dict[str, float]


class Soak:
    """One run: its folder, its configuration, what was read of it."""

    def __init__(self, folder: Path, model: str, batches: int):
        self.folder, self.batches = folder, batches
        self.state = folder / "state"
        file = folder / "muster.toml"
        file.write_text(_CONFIG.format(groups=GROUPS, model=model), "utf-8")
        self.environ = {**os.environ, "MUSTER_STATE_DIR": str(self.state)}
        self.command = [str(Path(sys.executable).with_name("muster")), "up", "--json"]
        self.command += ["--config", str(file)]
        self.config: Config = load_config(file, {"MUSTER_STATE_DIR": str(self.state)})
        self.read: list[tuple[int, Reading]] = []  # (batches trained, what was read then)
        self.seconds = 0.0

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Redis]:
        """Everything started; afterwards everything stopped."""
        with (self.folder / "up.jsonl").open("wb") as log:
            start = partial(
                subprocess.Popen, self.command, stdout=log, stderr=log, env=self.environ, cwd=ROOT
            )
            process: subprocess.Popen[Any] = await asyncio.to_thread(start)
        try:
            await self._announced(process)
            async with attached(self.config) as redis:
                yield redis
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            await asyncio.to_thread(process.wait, 60)

    async def _announced(self, process: subprocess.Popen[Any]) -> None:
        """Returns once every service is there."""
        wanted = {"router", "trainer", "readybank", "inference", "sandbox"}
        async with asyncio.timeout(STALL_S):
            while wanted:
                if process.poll() is not None:
                    last = (self.folder / "up.jsonl").read_text("utf-8")[-500:]
                    raise Unavailable(f"`muster up` ended: {last}")
                await asyncio.sleep(_POLL_S)
                try:
                    async with attached(self.config) as redis:
                        registry = Registry(redis, self.config.run)
                        wanted = {kind for kind in wanted if not await registry.list(kind)}
                except (MusterError, OSError):
                    continue

    async def run(self) -> None:
        """Submits, and reads until so many batches are trained. Raises when nothing moves."""
        begin = monotonic()
        async with self.up() as redis:
            registry = Registry(redis, self.config.run)
            (router,) = await registry.list("router")
            async with MusterClient(router.address) as client:
                policy = JobPolicy(infra_ceiling=1.0)
                # More than are needed, for some groups are filtered.
                groups = GROUPS * self.batches * 2
                await client.submit(
                    ROOT / "tasks", groups=groups, group_size=SIBLINGS, policy=policy
                )
            await self._watch(redis, registry)
        self.seconds = monotonic() - begin

    async def _watch(self, redis: Redis, registry: Registry) -> None:
        step, moved = 0, monotonic()
        while step < self.batches:
            await asyncio.sleep(_POLL_S)
            now = await trained(registry)
            if now > step:
                step, moved = now, monotonic()
            elif monotonic() - moved > STALL_S:
                raise Unavailable(f"no batch after {step} in {STALL_S:.0f} s", value=self.folder)
            self.read.append((step, await self._reading(redis)))

    async def _reading(self, redis: Redis) -> Reading:
        found: Reading = {}
        holding = state.read(self.state)
        for name, child in (holding.children if holding else {}).items():
            if child.process:
                found |= of_processes(name, tree(child.process.pid))
        if holding:
            found |= of_processes("supervisor", [holding.supervisor.pid])
        memory: dict[str, Any] = await redis.info("memory")
        found["redis used_memory KiB"] = memory["used_memory"] / 1024
        found["redis keys"] = float(await redis.dbsize())
        streams = RunStreams(redis, self.config.run)
        for name in STREAMS:
            found[f"stream {name}"] = float(await redis.xlen(streams.key(name)))
        return found

    def at(self, batch: int) -> Reading:
        """The figures of a batch: of the 50 up to it."""
        return self.between(batch - EVERY, batch, statistics.median)

    def between(self, after: int, upto: int, of: Callable[[list[float]], float]) -> Reading:
        """One figure of each reading over these batches."""
        window = [reading for step, reading in self.read if after < step <= upto]
        names = sorted({name for reading in window for name in reading})
        return {name: of([r[name] for r in window if name in r]) for name in names}

    def judge(self) -> tuple[dict[str, float], list[str]]:
        """The ratio of every figure, and the names of those that have grown."""
        memory = self.at(EVERY), self.at(self.batches)
        counts = (
            self.between(*SETTLED, statistics.median),
            self.between(self.batches - LAST, self.batches, min),
        )
        ratios, grown = {}, []
        for name in memory[1]:
            before, after = (
                part.get(name, 0.0) for part in (memory if of_memory(name) else counts)
            )
            ratios[name] = after / before if before else after + 1.0
            slack = 0.0 if name.endswith("KiB") else 1.0 if of_memory(name) else POOLED
            if after > before * RATIO_MAX and after > before + slack:
                grown.append(name)
        return ratios, grown


def of_memory(name: str) -> bool:
    return name.endswith("iB")


async def trained(registry: Registry) -> int:
    """The trainer's last step; 0 while it cannot be asked."""
    try:
        (entry,) = await registry.list("trainer")
        async with channel(entry.address) as opened:
            stub: Any = TrainerServiceStub(opened)
            with calling("status"):
                answer = await stub.GetTrainerStatus(pb.GetTrainerStatusRequest(), timeout=10)
    except (MusterError, ValueError):
        return 0
    return int(answer.step)


def of_processes(name: str, pids: list[int]) -> Reading:
    """Their resident memory, threads and open descriptors together; some may have ended."""
    rss_kib = threads = descriptors = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text("utf-8")
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        rss_kib += int(fields.get("VmRSS", "0").split()[0])
        threads += int(fields.get("Threads", "0"))
    return {
        f"{name} rss MiB": rss_kib / 1024,
        f"{name} threads": float(threads),
        f"{name} descriptors": float(descriptors),
    }


def tree(pid: int) -> list[int]:
    """The process and all that came from it and is there."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text("ascii").split()]
            except OSError:
                continue  # the thread has ended
    return found


def table(soak: Soak, marks: list[int], ratios: dict[str, float], grown: list[str]) -> str:
    """One row a figure, one column a batch."""
    readings = [soak.at(mark) for mark in marks]
    width = max(len(name) for name in ratios)
    shown = [*marks[:: max(1, len(marks) // 8)], *marks[-1:]]
    shown = list(dict.fromkeys(shown))
    lines = [" " * width + "".join(f"{mark:>10}" for mark in shown) + "     ratio"]
    for name, ratio in ratios.items():
        values = (readings[marks.index(mark)].get(name, 0.0) for mark in shown)
        row = f"{name:<{width}}" + "".join(f"{value:>10.1f}" for value in values)
        lines.append(f"{row}{ratio:>10.3f}" + ("  GROWS" if name in grown else ""))
    return "\n".join(lines)


def main() -> int:
    """0 when nothing has grown, 1 when something has."""
    parser = argparse.ArgumentParser(description="Does anything grow over many batches?")
    parser.add_argument("--batches", type=int, default=1000, help=f"at least {BATCHES_MIN}")
    parser.add_argument("--json", metavar="PATH", help="write the result there; - for stdout")
    parser.add_argument("--keep", type=Path, help="leave configuration, logs and state here")
    args = parser.parse_args()
    if args.batches < BATCHES_MIN:
        parser.error(f"--batches: at least {BATCHES_MIN}, for what is kept by design to be there")
    model = os.environ.get("MUSTER_TEST_MODEL", "smollm2-135m-instruct")
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = args.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder, model, args.batches)
        asyncio.run(soak.run())
        disk_mib = sum(f.stat().st_size for f in soak.state.rglob("*") if f.is_file()) / 2**20
    marks = list(range(EVERY, args.batches + 1, EVERY))
    ratios, grown = soak.judge()
    shown = sys.stderr if args.json == "-" else sys.stdout
    print(table(soak, marks, ratios, grown), file=shown)
    print(
        f"{args.batches} batches in {soak.seconds:.0f} s; {disk_mib:.0f} MiB on disk; "
        + (f"grows: {', '.join(grown)}" if grown else "nothing grows"),
        file=shown,
    )
    figures = {f"{name} at {mark}": v for mark in marks for name, v in soak.at(mark).items()}
    result = {
        "name": "soak",
        "machine": _results.machine(),
        "settings": {"batches": args.batches, "groups": GROUPS, "siblings": SIBLINGS},
        "figures": figures | {"seconds": soak.seconds, "disk MiB": disk_mib},
        "ratios": ratios,
    }
    text = json.dumps(result, indent=1)
    if args.json == "-":
        print(text)
    elif args.json:
        Path(args.json).write_text(text + "\n", "utf-8")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
