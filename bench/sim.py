"""How fast the simulation of collection runs, with the real machines in the loop.

    python -m bench.sim [--quick] [--json PATH]

Turns per second of CPU time of this process (one core), the muster arm, tb-like: as the benchmark
of collection runs it, and with every check after every event. Both in turns, medians over the
rounds. Each round's runs with equal seeds are compared by the hash of all events and commands.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from msgspec.structs import replace

from bench import _results
from sim.rollout.arms import MUSTER
from sim.rollout.muster import World
from sim.rollout.workload import TB_LIKE, Regime

SEED = 101
_SMALL = replace(TB_LIKE, name="small", groups=8, replicas=2, boxes=64)


def speed(regime: Regime, batches: int, *, checks: bool) -> tuple[float, World]:
    """Turns per CPU second of one run."""
    world = World(MUSTER, regime, SEED, batches, checks=checks)
    begun = time.process_time()
    world.run(follow=False)
    return world.router.turns / (time.process_time() - begun), world


def trace(seed: int) -> str:
    """Hash of everything that was said in a small run."""
    world = World(MUSTER, _SMALL, seed, 1, trace=True)
    world.run(follow=False)
    return world.heap.trace


def measured(*, quick: bool) -> dict[str, Any]:
    """The result, as all benchmarks have it."""
    machine = _results.machine()
    rounds, batches = (1, 1) if quick else (5, 3)
    plain: list[float] = []
    checked: list[float] = []
    turns = done = 0
    equal = True
    for number in range(rounds):
        rate, world = speed(TB_LIKE, batches, checks=False)
        plain.append(rate)
        turns = world.router.turns
        rate, world = speed(TB_LIKE, batches, checks=True)
        checked.append(rate)
        done = world.checks.done if world.checks else 0
        equal = equal and trace(SEED + number) == trace(SEED + number)
    figures = {
        "turns_per_s": statistics.median(plain),
        "turns_per_s_lowest": min(plain),
        "turns_per_s_checked": statistics.median(checked),
        "turns_per_s_checked_lowest": min(checked),
        "turns": turns,
        "checks": done,
        "equal_traces": float(equal),
    }
    return {
        "name": "sim",
        "machine": machine,
        "settings": {"quick": quick, "rounds": rounds, "batches": batches, "seed": SEED},
        "figures": figures,
        "ratios": {"checked_over_plain": statistics.median(checked) / statistics.median(plain)},
    }


def main() -> int:
    asked = _results.arguments(__doc__ or "")
    _results.publish(measured(quick=asked.quick), asked.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
