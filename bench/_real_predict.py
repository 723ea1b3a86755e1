"""What the simulator says of a run of bench.collection_real, before it is made.

Owns: what is fitted to a short recorded run, and the same arms simulated with it. Promise: pure and
seeded: an arm is the rules that its router has and the plans that its episodes follow; fitted are
the engine's constants (as `muster sim fit` does) and the seconds that real services add to a wait;
a fit that does not tell the run it comes from is refused. Does not cover: the real run
(_real_world.py).

Collection without admission is on the edge: a little less speed, and conversations are thrown out
of the caches more often, which costs more time. So each arm is simulated with engines of several
speeds around the fitted one, and its prediction is the median.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from statistics import fmean, median

from msgspec.structs import astuple, replace

from bench._real_plan import BLOCK, CONTEXT, Added, Book
from muster.entries import Intended, RunRecord, Turn
from muster.errors import InvalidInput
from muster.run_index import RunIndex
from muster.types import EpisodeKey, EpisodeState, StateInterval, Value, job_and_index
from services.router import events as e
from services.router.machine import RouterMachine
from services.router.rules import RouterRules
from sim.rollout import arms
from sim.rollout.costs import EngineCosts
from sim.rollout.engine import EngineModel
from sim.rollout.fit import Given, fit
from sim.rollout.muster import World

OFF_MOST = 0.25  # of the time of a calibration that its fit may be off by
SPEEDS = (0.97, 1.0, 1.03)
ARMS = {"muster": arms.MUSTER, "strong": arms.Arm("strong", ())}


class Fitted(Value, frozen=True):
    """Of a recorded run: the engine, and seconds beyond its plans. notes: what was not told."""

    engine: EngineCosts
    added: Added
    notes: tuple[str, ...] = ()

    def times(self, speed: float) -> Fitted:
        """The same with engines of so many times the speed."""
        slower = EngineCosts(*(s / speed for s in astuple(self.engine)))
        return replace(self, engine=slower)


class Predicted(Value, frozen=True):
    """One simulated arm. cuts_s: from the first launch to each batch. range_s: of the last one, the
    least and the most over engines of several speeds; 0: only one was simulated."""

    cuts_s: tuple[float, ...]
    split_s: dict[str, float]
    prefilled_tokens: int
    range_s: tuple[float, float] = (0.0, 0.0)


class Checked(Value, frozen=True):
    """Seconds from the first launch to the last recorded reply: in the run, and to the reply of the
    same number in its simulation."""

    measured_s: float
    predicted_s: float

    @property
    def off(self) -> float:
        """By how much of the measured time."""
        return abs(self.predicted_s / self.measured_s - 1)


def fitted(record: RunRecord, book: Book) -> Fitted:
    """What a run of that book tells. Raises InvalidInput when no episode of it has ended."""
    regime = book.regime
    given = Given(regime.kv_tokens, regime.context_limit, regime.turns_max, regime.boxes, CONTEXT)
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
    world = _world(arm, rules, book, batches, known, requests)
    world.run(follow=False)
    cuts = world.recorder.batches
    whole = {name: sum(cut.split[name] for cut in cuts) for name in cuts[0].split}
    return Predicted(tuple(cut.at for cut in cuts), whole, cuts[-1].prefilled_tokens)


def likely(
    arm: str, rules: RouterRules, book: Book, batches: int, known: Fitted, requests: int
) -> Predicted:
    """The median of engines of several speeds, by the time to the last batch."""
    found = [predicted(arm, rules, book, batches, known.times(speed), requests) for speed in SPEEDS]
    found.sort(key=lambda one: one.cuts_s[-1])
    return replace(found[len(found) // 2], range_s=(found[0].cuts_s[-1], found[-1].cuts_s[-1]))


def checked(
    record: RunRecord, rules: RouterRules, book: Book, batches: int, known: Fitted, requests: int
) -> Checked:
    """Whether the fit tells the run that it comes from, as far as that went.

    book: of that run. Raises InvalidInput when the record has no reply.
    """
    replies = _replies(record)
    if not replies:
        raise InvalidInput(
            "the calibration has no reply",
            field="--calibration-s",
            way_out="let it run longer; --keep DIR keeps the logs of its services",
        )
    world = _world("strong", rules, book, batches, known, requests)
    times: list[float] = []

    def watch(event: e.RouterEvent, _: list[e.RouterCommand]) -> None:
        if isinstance(event, e.Generated):
            times.append(world.heap.now)

    world.router.watch = watch
    world.run(follow=False)
    began = min(opened.opened_unix_s for opened in record.opened)
    number = min(len(replies), len(times))
    return Checked(replies[number - 1] - began, times[number - 1])


def require_told(told: Checked) -> None:
    """Raise InvalidInput when the fit is too far off its own run for any prediction."""
    if told.off > OFF_MOST:
        raise InvalidInput(
            f"the fitted engine takes {told.predicted_s:.0f} s for what the calibration did in "
            f"{told.measured_s:.0f} s: it would predict nothing of worth",
            field="--calibration-s",
            way_out="leave the machine to the benchmark alone, or let the calibration run longer",
        )


def _replies(record: RunRecord) -> list[float]:
    """When they were made, Unix seconds, in order."""
    entries: list[Turn | Intended] = [*record.turns, *record.intended]
    found: dict[tuple[str, int], float] = {}
    for entry in entries:
        ends = [i.end_unix_s for i in entry.intervals if i.state in _ENGINE]
        if ends:
            found.setdefault((entry.key.id, entry.turn), max(ends))
    return sorted(found.values())


def _world(
    arm: str, rules: RouterRules, book: Book, batches: int, known: Fitted, requests: int
) -> World:
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
    return world


def less(muster_s: float, strong_s: float) -> float:
    """How much less time muster takes, as a share."""
    return 1 - muster_s / strong_s
