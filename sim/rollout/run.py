"""Any arm by its name: one run, its figures, its bounds.

Owns: which program an arm is. Promise: equal arguments give equal results, in any process. Does not
cover: comparing arms (bench/collection.py).
"""

from __future__ import annotations

from itertools import chain

from muster.errors import NotFound
from muster.types import Value
from sim.rollout import arms
from sim.rollout.baselines import BASELINES
from sim.rollout.bound import Bounds, bounds
from sim.rollout.costs import EngineCosts
from sim.rollout.figures import RunFigures, steady
from sim.rollout.measure import Recorder, Sample
from sim.rollout.muster import World
from sim.rollout.workload import REGIMES, Regime, Workload, variants

NAMES = (*BASELINES, *arms.ARMS)


class Result(Value, frozen=True):
    """What one run gave. `bounds`: per batch, of exactly what the steady batches trained; `each`:
    of each of them alone."""

    figures: RunFigures
    bounds: Bounds
    each: tuple[Bounds, ...] = ()


def regime_named(name: str) -> Regime:
    """A regime or one of its variants."""
    every = {**REGIMES, **{n: v for base in REGIMES.values() for n, v in variants(base).items()}}
    if name not in every:
        known = ", ".join(every)
        raise NotFound("no such regime", field="regime", value=name, way_out=f"one of: {known}")
    return every[name]


def run(arm: str, regime: str, seed: int, batches: int, *, follow: bool = True) -> Result:
    """`batches` of one arm; with `follow`, until each group that was opened has its fate."""
    asked = regime_named(regime)
    if arm in BASELINES:
        loop = BASELINES[arm](asked, seed, batches, follow=follow)
        return _result(loop.run(), loop.recorder, asked, seed)
    if arm not in arms.ARMS:
        known = ", ".join(NAMES)
        raise NotFound("no such arm", field="arm", value=arm, way_out=f"one of: {known}")
    world = World(arms.ARMS[arm], asked, seed, batches)
    world.run(follow=follow)
    return _result(world.figures(), world.recorder, asked, seed)


def _result(figures: RunFigures, recorder: Recorder, regime: Regime, seed: int) -> Result:
    measured, costs, workload = steady(recorder.batches), EngineCosts(), Workload(regime, seed)
    batch_of = {group: n for n, batch in enumerate(measured) for group in batch.groups}
    trained: list[list[Sample]] = [[] for _ in measured]
    for sample in recorder.samples:
        if sample.group in batch_of:
            trained[batch_of[sample.group]].append(sample)
    whole = bounds(chain.from_iterable(trained), workload, costs, len(measured))
    return Result(figures, whole, tuple(bounds(its, workload, costs, 1) for its in trained))
