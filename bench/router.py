"""Turns per second of one router, and how late its event loop is.

    python -m bench.router [--quick] [--json PATH|-]

A router as it is shipped (a process, real gRPC, a real server of streams, journal and traces on)
runs EPISODES at once against replicas and boxes of another process that think 50 ms. Contexts start
at 32,000 tokens; every turn adds a reply and an observation of the simulated workload's median
sizes. There are as many tasks as groups at once, more than a router keeps openings of, so each
group's is encoded; its siblings share it. Whatever is slower than 100 ms a turn is therefore the
router, its server of streams, or the fakes; the processor share of each says which. A turn counts
when the router knows that it is durable, by its own journal. The window begins when each of the
first EPISODES that got a box has had a turn. The lag is
what the router itself measures (muster/lag.py): the p99 of all timers of the window, as the edge
below which it lies, and beside it the p99 of the worst TELL_S alone.
Does not cover: engines and boxes that do something, the bank and the trainer (bench.router_soak).
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import _results
from bench import _router_world as world
from muster.clock import monotonic
from muster.lag import quantile_ms

EPISODES, SIBLINGS, TURNS, PROMPT_TOKENS, TASKS = 2048, 8, 12, 32_000, 256
FILLED_S, TELL_S = 600.0, 2.0
_CONFIG = """
groups_per_batch = 4096
[telemetry]
loop_lag_s = {tell_s}
[router]
listen = "127.0.0.1:0"
episodes_max = {episodes}
turns_max = {turns}
turn_tokens_max = 256
episode_tokens_max = 1000000
context_tokens_max = 65536
episode_timeout_s = 3600.0
generate_timeout_s = 120.0
"""


def window_rate(turns: list[float], begin: float, end: float) -> float:
    """Turns a second in [begin, end); both in seconds of one clock."""
    return sum(begin <= at < end for at in turns) / (end - begin)


def added(lags: Sequence[Mapping[str, Any]]) -> list[int]:
    """The counts of windows that follow each other, as those of one."""
    return [sum(some) for some in zip(*(lag["counts"] for lag in lags), strict=True)]


async def _filled(running: world.World, job: str, episodes: int) -> float:
    """Returns once all have begun and each had its first turn: the seconds that took."""
    began, first = monotonic(), world.FirstTurns(running.journals, episodes)
    while monotonic() - began < FILLED_S:
        await asyncio.sleep(1.0)
        progress = await running.client.get(job)
        if progress.episodes_running + progress.episodes_finished < episodes:
            continue
        if first.all():
            return monotonic() - began
    raise SystemExit(f"not all episodes had a turn within {FILLED_S:g} s")


async def measure(folder: Path, episodes: int, seconds: float) -> dict[str, float]:
    """Figures of one run."""
    tasks = world.tasks(folder / "tasks", TASKS, tokens=PROMPT_TOKENS, turns=TURNS)
    config = _CONFIG.format(tell_s=TELL_S, episodes=episodes, turns=TURNS)
    async with world.router(folder, config, world.Fakes()) as running:
        groups = 4 * episodes // SIBLINGS
        job = await running.client.submit(tasks, groups=groups, group_size=SIBLINGS)
        filled_s = await _filled(running, job, episodes)
        told, cpu, begin = len(running.lags()), running.cpu_s(), monotonic()
        await asyncio.sleep(seconds)
        end, after = monotonic(), running.cpu_s()
        lags = running.lags()[told:]
    turns = running.turns_at()
    rate = window_rate(turns, begin, end)
    shares = {f"{n}_cpu_share": (after[n] - cpu[n]) / (end - begin) for n in cpu}
    return {
        "turns_per_s": rate,
        "router_cpu_ms_per_turn": 1e3 * shares["router_cpu_share"] / max(rate, 1e-9),
        "loop_lag_p99_ms": quantile_ms(added(lags), 0.99),
        "loop_lag_p99_worst_2s_ms": max(lag["p99_ms"] for lag in lags),
        "loop_lag_p99_median_ms": statistics.median(lag["p99_ms"] for lag in lags),
        "loop_lag_p50_ms": statistics.median(lag["p50_ms"] for lag in lags),
        "loop_lag_max_ms": max(lag["max_ms"] for lag in lags),
        "filled_s": filled_s,
        **shares,
    }


async def _all(quick: bool) -> dict[str, Any]:
    settings = {
        "episodes": 256 if quick else EPISODES,
        "seconds": 8 if quick else 60,
        "prompt_tokens": PROMPT_TOKENS,
        "turns": TURNS,
        "siblings": SIBLINGS,
        "tasks": TASKS,
        "redis_appendfsync": "everysec",
        **{name: getattr(world.Fakes(), name) for name in world.Fakes.__struct_fields__},
        "quick": quick,
    }
    with tempfile.TemporaryDirectory(prefix="mr-") as name:
        figures = await measure(Path(name), settings["episodes"], settings["seconds"])
    ratios = {k: round(v, 3) for k, v in figures.items() if k.endswith("_share")}
    plain = {k: round(v, 3) for k, v in figures.items() if k not in ratios}
    return {"settings": settings, "figures": plain, "ratios": ratios}


def main() -> None:
    asked = _results.arguments(__doc__ or "")
    machine = _results.machine()
    result = asyncio.run(_all(asked.quick))
    _results.publish({"name": "router", "machine": machine, **result}, asked.json)


if __name__ == "__main__":
    main()
