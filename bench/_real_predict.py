"""What the simulator says of a run of bench.collection_real, before it is made.

Owns: what is fitted to a short recorded run, and the same arms simulated with it. Promise: pure and
seeded: an arm is the rules that its router has and the plans that its episodes follow; fitted are
the engine's constants (as `muster sim fit` does) and the seconds that real services add to a wait.
Does not cover: the real run (_real_world.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from statistics import fmean, median

from bench._real_plan import BLOCK, CONTEXT, Added, Book
from muster.entries import RunRecord, Turn
from muster.run_index import RunIndex
from muster.types import EpisodeKey, EpisodeState, StateInterval, Value, job_and_index
from services.router.machine import RouterMachine
from services.router.rules import RouterRules
from sim.rollout import arms
from sim.rollout.costs import EngineCosts
from sim.rollout.engine import EngineModel
from sim.rollout.fit import Given, fit
from sim.rollout.muster import World

ARMS = {"muster": arms.MUSTER, "strong": arms.Arm("strong", ())}


class Fitted(Value, frozen=True):
    """Of a recorded run: the engine, and seconds beyond its plans. notes: what was not told."""

    engine: EngineCosts
    added: Added
    notes: tuple[str, ...] = ()


class Predicted(Value, frozen=True):
    """One simulated arm. cuts_s: from the first launch to each batch."""

    cuts_s: tuple[float, ...]
    split_s: dict[str, float]
    prefilled_tokens: int


def fitted(record: RunRecord, book: Book) -> Fitted:
    """What a run of that book tells. Raises InvalidInput when no episode of it has ended."""
    regime = book.regime
    given = Given(regime.kv_tokens, regime.context_limit, regime.turns_max, regime.boxes)
    model = fit(record, given)
    index, plans = RunIndex(record), book.planned()
    boxes: list[float] = []
    verifies: list[float] = []
    for found in index.finished.values():
        plan = plans.plan(*_place(found[0].key))
        verifies += [s - plan.verify_s for s in _seconds(found[0].intervals, EpisodeState.VERIFY)]
    steps: list[float] = []
    for turns in index.turns.values():
        boxes += _seconds(turns[0].intervals, EpisodeState.BOX_START)
        plan = plans.plan(*_place(turns[0].key))
        steps += [gap - plan.turns[turn.turn].tool_s for turn, gap in _gaps(turns)]
    added = Added(
        median(boxes) if boxes else regime.warm_s,
        max(0.0, fmean(steps)) if steps else 0.0,
        max(0.0, fmean(verifies)) if verifies else 0.0,
    )
    return Fitted(model.engine, added, model.notes)


def _place(key: EpisodeKey) -> tuple[int, int, int]:
    _, index = job_and_index(key.group) or ("", 0)
    return index, key.sibling, key.attempt


def _seconds(intervals: Iterable[StateInterval], state: EpisodeState) -> list[float]:
    return [i.end_unix_s - i.start_unix_s for i in intervals if i.state is state]


def _gaps(turns: list[Turn]) -> Iterator[tuple[Turn, float]]:
    """Seconds between a reply and the request after it."""
    for turn, after in pairwise(turns):
        ends = [i.end_unix_s for i in turn.intervals if i.state is EpisodeState.DECODE]
        starts = [i.start_unix_s for i in after.intervals if i.state in _ENGINE]
        if ends and starts and after.turn == turn.turn + 1:
            yield turn, min(starts) - max(ends)


_ENGINE = (EpisodeState.QUEUE, EpisodeState.PREFILL, EpisodeState.DECODE)


def predicted(
    arm: str, rules: RouterRules, book: Book, batches: int, known: Fitted, requests: int
) -> Predicted:
    """The same arm, book and rules simulated; requests: most that run at once on a replica."""
    world = World(ARMS[arm], book.regime, book.seed, batches, costs=known.engine)
    for name in world.models:
        world.models[name] = EngineModel(
            kv_tokens=book.regime.kv_tokens,
            block=BLOCK,
            costs=known.engine,
            running_max=requests,
            chunk_tokens=CONTEXT,
        )
    world.workload = world.router.workload = book.planned(known.added)
    world.router.machine = RouterMachine(rules)
    world.run(follow=False)
    cuts = world.recorder.batches
    whole = {name: sum(cut.split[name] for cut in cuts) for name in cuts[0].split}
    return Predicted(tuple(cut.at for cut in cuts), whole, cuts[-1].prefilled_tokens)


def less(muster_s: float, strong_s: float) -> float:
    """How much less time muster takes, as a share."""
    return 1 - muster_s / strong_s
