"""Does anything grow in a router? Many short episodes through one process.

    python -m bench.router_soak [--episodes 20000] [--json PATH|-]

A router and a bank as they are shipped, fakes that think 10 ms, and a trainer that leases and
acknowledges batches at once and publishes a version for each, so that groups get their fate and
are retired. Contexts begin at 2,000
tokens; an episode has two turns. Once a second the router's resident memory, descriptors and
threads are read, and the server's memory, keys and streams; a figure of EVERY episodes is the
median of what was read during them. Memory has grown when the last figure is above 1.05 times the
median of those of the first half, the first EVERY episodes left out (the warm-up), and by more than
1 MiB; what is counted goes up and down with what is open, so it has grown when even its lowest
reading of the last EVERY episodes is above 1.05 times that median, by more than POOLED; the
versions that the bank keeps on purpose have grown when they are more than those.
Does not cover: speed (bench.router), the disk (journal and history grow by design).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from redis.asyncio import Redis

from bench import _bank_world as banking
from bench import _results, soak
from bench import _router_world as world
from muster.clock import monotonic
from muster.errors import Unavailable
from muster.streams import STREAMS, RunStreams, StreamEntry, next_epoch
from muster.tasks import end
from muster.v1 import events_pb2 as ev
from services.readybank.retire import VERSIONS_KEPT

EVERY, SIBLINGS, GROUPS, TURNS, PROMPT_TOKENS, AT_ONCE, KEPT = 2000, 8, 64, 2, 2000, 256, 1
RATIO_MAX, SLACK_MIB, POOLED, STALL_S = 1.05, 1.0, 3.0, 120.0
EPISODES_MIN = 2 * EVERY
# What is kept on purpose fills up slowly: it has not grown before it is full.
_FULL = {"stream_versions": VERSIONS_KEPT + 4.0}  # and those that open groups began under
_FAKES = world.Fakes(replicas=2, hosts=2, think_ms=10.0, reply_tokens=64, output_bytes=400)
_CONFIG = """
groups_per_batch = {groups}
[telemetry]
loop_lag_s = 10.0
[router]
listen = "127.0.0.1:0"
lag_max = 1
episodes_max = {at_once}
turns_max = {turns}
turn_tokens_max = 128
episode_tokens_max = 100000
context_tokens_max = 8192
groups_max = 100000
"""

Reading = dict[str, float]


class Kept:
    """What was read, by episodes finished."""

    def __init__(self) -> None:
        self.read: list[tuple[int, Reading]] = []

    def of(self, mark: int, name: str) -> list[float]:
        """The readings of the EVERY episodes up to `mark`."""
        return [r[name] for n, r in self.read if mark - EVERY < n <= mark and name in r]

    def names(self) -> list[str]:
        return sorted({name for _, reading in self.read for name in reading})

    def at(self, mark: int) -> Reading:
        """Their medians."""
        values = {name: self.of(mark, name) for name in self.names()}
        return {name: statistics.median(v) for name, v in values.items() if v}

    def judge(self, marks: Sequence[int]) -> tuple[Reading, list[str]]:
        """The last figure over the median of the first half's, and what has grown."""
        half = [m for m in marks if EVERY < m <= marks[-1] // 2] or [*marks[:1]]
        ratios, grown = Reading(), []
        for name in self.names():
            before = [self.at(mark)[name] for mark in half if name in self.at(mark)]
            last = self.of(marks[-1], name)
            if not before or not last:
                continue
            base = statistics.median(before)
            memory = name.endswith("mib")
            value = statistics.median(last) if memory else min(last)
            slack = SLACK_MIB if memory else POOLED
            ratios[f"{name}_ratio"] = value / base if base else 1.0 + value
            if value > max(base * RATIO_MAX, base + slack, _FULL.get(name, 0.0)):
                grown.append(name)
        return ratios, grown


async def read(running: world.World) -> Reading:
    """The router's process and the server, now."""
    found: Reading = {}
    for name, value in soak.of_processes("router", [running.pids["router"]]).items():
        found[name.replace(" ", "_").lower()] = value
    memory: dict[str, Any] = await running.redis.info("memory")
    found["redis_used_mib"] = memory["used_memory"] / 2**20
    found["redis_keys"] = float(await running.redis.dbsize())
    streams = RunStreams(running.redis, world.RUN)
    for name in STREAMS:
        found[f"stream_{name}"] = float(await running.redis.xlen(streams.key(name)))
    return found


async def train(channel: grpc.aio.Channel, redis: Redis) -> None:
    """Lease, acknowledge and publish until cancelled."""
    epoch = await next_epoch(redis, world.RUN, "trainer")
    streams = RunStreams(redis, world.RUN, role="trainer", epoch=epoch)
    await banking.register(channel, epoch)
    step = 0
    while True:
        step += 1
        await banking.lease(channel, step, GROUPS)
        await banking.acknowledge(channel, step, max(0, step - KEPT))
        record = ev.PolicyVersionRecord(
            version=step, stage=ev.VERSION_STAGE_PUBLISHED, step=ev.StepReport(step=step)
        )
        data = record.SerializeToString()
        await streams.append([StreamEntry("versions", "versions", f"{step}/published", data)])


async def run(folder: Path, episodes: int) -> tuple[Kept, float]:
    """What was read of a run of so many episodes, and its seconds. Raises when nothing moves."""
    kept, groups = Kept(), -(-episodes // SIBLINGS)
    tasks = world.tasks(folder / "tasks", 16, tokens=PROMPT_TOKENS, turns=TURNS)
    config = _CONFIG.format(groups=GROUPS, at_once=AT_ONCE, turns=TURNS)
    async with (
        world.router(folder, config, _FAKES) as running,
        banking.bank(folder, running.redis, running.url) as (_, channel),
        asyncio.TaskGroup() as owned,
    ):
        trainer = owned.create_task(train(channel, running.redis), name="trainer")
        # Some more than are counted: the last ones are still open then.
        job = await running.client.submit(tasks, groups=groups + 2 * GROUPS, group_size=SIBLINGS)
        began = moved = monotonic()
        done = 0
        while done < episodes:
            await asyncio.sleep(1.0)
            now = (await running.client.get(job)).episodes_finished
            if now > done:
                done, moved = now, monotonic()
            elif monotonic() - moved > STALL_S:
                raise Unavailable(f"no episode after {done} in {STALL_S:g} s", value=folder)
            kept.read.append((done, await read(running)))
        seconds = monotonic() - began
        await end(trainer)
    return kept, seconds


def table(kept: Kept, marks: Sequence[int], ratios: Reading, grown: Sequence[str]) -> str:
    """One row a figure, one column EVERY episodes."""
    width = max(len(name) for name in kept.names())
    lines = [" " * width + "".join(f"{mark:>9}" for mark in marks) + "    ratio"]
    figures = [kept.at(mark) for mark in marks]
    for name in kept.names():
        row = "".join(f"{at.get(name, float('nan')):>9.1f}" for at in figures)
        ratio = ratios.get(f"{name}_ratio", float("nan"))
        told = "  GROWS" if name in grown else ""
        lines.append(f"{name:<{width}}{row}{ratio:>9.3f}{told}")
    return "\n".join(lines)


def main() -> int:
    """0 when nothing has grown, 1 when something has."""
    parser = argparse.ArgumentParser(description="Does a router grow over many episodes?")
    parser.add_argument("--episodes", type=int, default=20_000, help=f"at least {EPISODES_MIN}")
    parser.add_argument("--json", metavar="PATH", help="write the result there; - for stdout")
    args = parser.parse_args()
    if args.episodes < EPISODES_MIN:
        parser.error(f"--episodes: at least {EPISODES_MIN}, or there is no first half")
    machine = _results.machine()
    with tempfile.TemporaryDirectory(prefix="rs-") as name:
        kept, seconds = asyncio.run(run(Path(name), args.episodes))
    marks = list(range(EVERY, args.episodes + 1, EVERY))
    ratios, grown = kept.judge(marks)
    shown = sys.stderr if args.json == "-" else sys.stdout
    print(table(kept, marks, ratios, grown), file=shown)
    verdict = f"grows: {', '.join(grown)}" if grown else "nothing grows"
    print(f"{args.episodes} episodes in {seconds:.0f} s; {verdict}", file=shown)
    figures = {f"{name}_at_{mark}": v for mark in marks for name, v in kept.at(mark).items()}
    result = {
        "name": "router_soak",
        "machine": machine,
        "settings": {"episodes": args.episodes, "siblings": SIBLINGS, "turns": TURNS},
        "figures": {**figures, "seconds": seconds, "grown": float(len(grown))},
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
