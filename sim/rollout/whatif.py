"""What a run would do on other machines: time to batch, waiting engines, cost, where money helps.

Owns: the question, the answer, the changes that are tried beside it. Promise: pure and seeded: an
answer is that of a direct simulation of the same regime, engines and seeds; all changes are tried
under the same seeds, so that their differences are of the change. Does not cover: fitting
(fit.py), processes and texts (muster/cli/sim.py).

What it cannot know: docs/SIMULATION.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from msgspec.structs import replace

from muster.types import Value
from sim.rollout import arms
from sim.rollout.figures import SETTLING, STEADY_MIN
from sim.rollout.fit_model import Model
from sim.rollout.muster import World
from sim.rollout.workload import Regime, Workload

_TURNS_MAX = 100_000  # simulated per run, in all its batches: some fifteen seconds
_BATCHES = (2, SETTLING + STEADY_MIN)  # at least, at most
_PLANS = 1_000  # trajectories of which a mean batch is made
_KV_MORE = 1.1
_ROOM_TOKENS = 64  # of KV beyond the longest context: whole blocks
_BOXES_MORE = 8  # an eighth


class Question(Value, frozen=True):
    """What to change of the model's run; None leaves it as recorded. Prices per hour."""

    replicas: int | None = None
    boxes: int | None = None
    kv_tokens: int | None = None
    groups: int | None = None  # of a batch
    group_size: int | None = None
    warm: bool = True  # boxes stand ready and are set up once a task
    gpu_hour_price: float = 0.0  # of one replica
    box_hour_price: float = 0.0  # of one box
    seeds: int = 1
    batches: int = 0  # measured; 0: as many as the time allows


class Setup(Value, frozen=True):
    """One fleet to be simulated under one seed."""

    name: str
    regime: Regime
    warm: bool
    seed: int
    batches: int


class Result(Value, frozen=True):
    """One simulation of a Setup. `batch_s`: see `time_to_batch`; `gpu_wait_s`:
    gpu_seconds_waiting_on_environments per batch, over all replicas."""

    batch_s: float
    first_batch_s: float
    gpu_wait_s: float
    gpu_wait_share: float  # of the replicas' time, the first batch included
    busy: float
    split_s: dict[str, float]


class Fleet(Value, frozen=True):
    """One fleet, over its seeds."""

    name: str
    replicas: int
    boxes: int
    kv_tokens: int
    warm: bool
    batch_s: float
    first_batch_s: float
    gpu_wait_s: float
    gpu_wait_share: float  # of the replicas' time
    busy: float
    split_s: dict[str, float]
    price_hour: float  # of all its replicas and boxes
    cost_per_batch: float


class Change(Value, frozen=True):
    """What one more unit would do. `saves_s` per batch; `worth`: seconds per batch saved for each
    1 an hour that the change costs; None where it has no price."""

    fleet: Fleet
    saves_s: float
    saves_cost: float  # per batch
    worth: float | None


class WhatIf(Value, frozen=True):
    """The answer; changes with the most useful first."""

    run: str
    recorded_batch_s: float  # of the fitted run, on its own machines; 0: none
    base: Fleet
    changes: tuple[Change, ...]
    batches: int
    seeds: int
    notes: tuple[str, ...]
    format: int = 1


def setups(model: Model, question: Question) -> list[Setup]:
    """What has to be simulated: the fleet that was asked for, then each change of it; by seed."""
    base = _asked(model.regime, question)
    warm = question.warm
    found = [("as asked", base, warm)]
    found.append(("one more replica", replace(base, replicas=base.replicas + 1), warm))
    more = max(1, base.boxes // _BOXES_MORE)
    boxes = "one more box" if more == 1 else f"{more} more boxes"
    found.append((boxes, replace(base, boxes=base.boxes + more), warm))
    kv = int(base.kv_tokens * _KV_MORE)
    found.append(("a tenth more KV", replace(base, kv_tokens=kv), warm))
    if not warm:
        found.append(("warm boxes", base, True))
    batches = question.batches or _batches(base)
    return [
        Setup(name, regime, is_warm, seed, batches)
        for name, regime, is_warm in found
        for seed in range(1, question.seeds + 1)
    ]


def _asked(regime: Regime, question: Question) -> Regime:
    named = ("replicas", "boxes", "kv_tokens", "groups", "group_size")
    asked = {n: v for n in named if (v := getattr(question, n)) is not None}
    kv = asked.get("kv_tokens", regime.kv_tokens)
    return replace(regime, **asked, context_limit=min(regime.context_limit, kv - _ROOM_TOKENS))


def _batches(regime: Regime) -> int:
    turns = regime.trajectories * min(regime.turns.mean, regime.turns_max)
    return int(min(max(_TURNS_MAX // turns, _BATCHES[0]), _BATCHES[1]))


def simulate(model: Model, setup: Setup) -> Result:
    """One run of the production machines on that fleet."""
    arm = arms.MUSTER if setup.warm else arms.ARMS["without boxes"]
    world = World(arm, setup.regime, setup.seed, setup.batches, costs=model.engine)
    world.run(follow=False)
    found = world.figures()
    whole_s = found.first_batch_s + sum(found.intervals_s if found.batches > 1 else ())
    return Result(
        batch_s=time_to_batch(world),
        first_batch_s=found.first_batch_s,
        gpu_wait_s=found.gpu_wait_s,
        gpu_wait_share=found.gpu_wait_s * found.batches / (setup.regime.replicas * whole_s),
        busy=found.busy,
        split_s=found.split_s,
    )


def time_to_batch(world: World) -> float:
    """Seconds that the engines need for the tokens of a mean batch, at the rate at which they
    sampled in the steady batches of a run, or in those after the first if it is short.

    By tokens and not by cuts: the first batches are made of short groups while long ones are under
    way, and few batches are light or heavy by chance. Tokens of lost attempts count as others.
    """
    fleets, regime = world.fleets, world.regime
    before = SETTLING if len(fleets) >= SETTLING + STEADY_MIN else 1
    begun_s, begun = 0.0, 0
    if len(fleets) > before:
        begun_s, begun = fleets[before - 1].at, fleets[before - 1].sampled_tokens
    rate = (fleets[-1].sampled_tokens - begun) / (fleets[-1].at - begun_s)
    return mean_batch_tokens(world.workload, regime) / rate


def mean_batch_tokens(workload: Workload, regime: Regime) -> float:
    """Sampled tokens of a mean batch, from the first groups of the workload."""
    groups = -(-_PLANS // regime.group_size)
    siblings = range(regime.group_size)
    plans = (workload.plan(group, sibling, 0) for group in range(groups) for sibling in siblings)
    return sum(plan.sampled_tokens for plan in plans) * regime.groups / groups


def answer(
    model: Model, question: Question, asked: Sequence[Setup], results: Sequence[Result]
) -> WhatIf:
    """Of `setups` and their results, in the same order."""
    names = list(dict.fromkeys(setup.name for setup in asked))
    pairs = list(zip(asked, results, strict=True))
    fleets = [_fleet(question, [(s, r) for s, r in pairs if s.name == name]) for name in names]
    base = fleets[0]
    changes = sorted(
        (_change(base, fleet) for fleet in fleets[1:]),
        key=lambda c: (c.worth is None, -(c.worth or 0.0), -c.saves_s),
    )
    return WhatIf(
        run=model.run,
        recorded_batch_s=model.batch_s,
        base=base,
        changes=tuple(changes),
        batches=asked[0].batches,
        seeds=question.seeds,
        notes=(*model.notes, *_unsettled(asked[0].batches)),
    )


def _unsettled(batches: int) -> tuple[str, ...]:
    settled = SETTLING + STEADY_MIN
    if batches >= settled:
        return ()
    return (
        f"{batches} batches are too few for the work in progress to have its mix: differences "
        f"between fleets are of more use than the times; --batches {settled} is settled",
    )


def _fleet(question: Question, found: Sequence[tuple[Setup, Result]]) -> Fleet:
    setup = found[0][0]
    regime, results = setup.regime, [result for _, result in found]
    batch_s = median(r.batch_s for r in results)
    wait_s = fmean(r.gpu_wait_s for r in results)
    price = regime.replicas * question.gpu_hour_price + regime.boxes * question.box_hour_price
    return Fleet(
        name=setup.name,
        replicas=regime.replicas,
        boxes=regime.boxes,
        kv_tokens=regime.kv_tokens,
        warm=setup.warm,
        batch_s=batch_s,
        first_batch_s=median(r.first_batch_s for r in results),
        gpu_wait_s=wait_s,
        gpu_wait_share=fmean(r.gpu_wait_share for r in results),
        busy=fmean(r.busy for r in results),
        split_s={name: fmean(r.split_s[name] for r in results) for name in results[0].split_s},
        price_hour=price,
        cost_per_batch=price * batch_s / 3600,
    )


def _change(base: Fleet, fleet: Fleet) -> Change:
    saves_s, more = base.batch_s - fleet.batch_s, fleet.price_hour - base.price_hour
    return Change(
        fleet=fleet,
        saves_s=saves_s,
        saves_cost=base.cost_per_batch - fleet.cost_per_batch,
        worth=saves_s / more if more > 0 else None,
    )
