"""What Muster is measured against: how others collect, at equal resources.

Owns: the four baselines by name. Promise: each is as strong as its description in the benchmark
allows; equal seeds give equal figures. Does not cover: the production machines (sim/rollout/arms).
"""

from __future__ import annotations

from sim.rollout.baselines.asynchronous import AsyncStrong
from sim.rollout.baselines.barrier import Plain, Strong
from sim.rollout.baselines.episodes import Loop
from sim.rollout.baselines.holding import HoldResume
from sim.rollout.figures import RunFigures
from sim.rollout.workload import Regime

BASELINES: dict[str, type[Loop]] = {
    kind.name: kind for kind in (Plain, Strong, AsyncStrong, HoldResume)
}


def run(name: str, regime: Regime, seed: int, batches: int, *, follow: bool = True) -> RunFigures:
    """One baseline: `batches` batches, then what is open to its end if `follow`."""
    return BASELINES[name](regime, seed, batches, follow=follow).run()
