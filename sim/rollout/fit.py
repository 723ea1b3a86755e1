"""Fits the simulated workload to a recorded run.

Owns: which recorded figure becomes which part of the model, and how good it is. Promise: pure: a
record in, a model out; what the record cannot tell keeps the given value and is named in `notes`.
Does not cover: reading records (muster.record), the file (fit_model.py), engine constants
(fit_engine.py), what is predicted with the model (whatif.py).

Quantities are log-normal, as in the simulated workload (docs/SIMULATION.md): median and spread of
the recorded ones; where a cap cuts the upper tail, from the lower half. That half of each spread
is shared by the siblings of a task is taken over, not fitted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median, pstdev

from msgspec.structs import asdict, replace

from muster.entries import RunRecord, Turn
from muster.errors import InvalidInput
from muster.lanes import stretches
from muster.report import report
from muster.run_index import RunIndex
from muster.types import EpisodeState, Outcome, StateInterval, Value
from sim.rollout.costs import EngineCosts
from sim.rollout.fit_engine import CHUNK_TOKENS, EngineFit, fit_engine, seconds
from sim.rollout.fit_model import Goodness, Model
from sim.rollout.workload import TB_LIKE, Regime, Spread, Workload

_SAMPLES_MIN = 4  # fewer say nothing about a spread
_COLD_S = 1.0  # a box that took less was warm or a fork
_CAPPED = 0.01  # share at the cap from which on the upper half is not used
_ROOM_TOKENS = 64  # of KV beyond the longest context: whole blocks
_GROUPS = 64  # drawn for the predicted quantiles


class Given(Value, frozen=True):
    """What the settings of the run say; None: not known, the record's own bound is taken."""

    kv_tokens: int | None = None  # per replica
    context_limit: int | None = None
    turns_max: int | None = None
    boxes: int | None = None
    chunk_tokens: int = CHUNK_TOKENS  # of prefill in a step


NOTHING = Given()


class _Seen(Value, frozen=True):
    """Recorded quantities; seconds and tokens."""

    turns: list[float]
    observation: list[float]
    sampled: list[float]
    tool: list[float]
    verify: list[float]
    box: list[float]
    prompt: list[float]
    shared: list[float]  # tokens of a group's first prompt that were cached
    passes: list[float]  # pass rate by group
    starts: int
    starts_failed: int
    box_s: float
    lost: int
    context_max: int
    boxes_most: int


def fit(record: RunRecord, given: Given = NOTHING) -> Model:
    """The model of a run. Raises InvalidInput when no episode of it has ended."""
    index = RunIndex(record)
    turns = [found[0] for found in _turns(index).values()]
    seen = _see(index)
    if not turns or not seen.turns:
        raise InvalidInput(
            "no episode of that run has ended, so nothing can be fitted",
            field="run",
            value=record.run,
            way_out="let it run on, or name another with --run",
        )
    notes: list[str] = []
    engine = fit_engine(turns, EngineCosts(), given.chunk_tokens)
    if not engine.prefill_told:
        notes.append("too few turns tell the cost of prefill: the published constants stand")
    if not engine.step_told:
        notes.append("too few turns tell the cost of a step: the published constants stand")
    if engine.prefill_told or engine.step_told:
        given_s = ", ".join(f"{name} = {s:.4g}" for name, s in asdict(engine.costs).items())
        notes.append(f"the router predicts by these costs when its section has them: {given_s}")
    regime = _regime(index, seen, given, turns, notes)
    goodness = {**_workload_goodness(regime, seen), **_engine_goodness(engine)}
    warm = [b.time_to_trainable_batch_s for b in report(record).batches if not b.cold]
    return Model(
        run=record.run,
        regime=regime,
        engine=engine.costs,
        batch_s=median(warm) if warm else 0.0,
        goodness=goodness,
        notes=tuple(notes),
    )


def _turns(index: RunIndex) -> dict[tuple[str, int], list[Turn]]:
    """By episode and number; the first record of a turn counts."""
    found: dict[tuple[str, int], list[Turn]] = defaultdict(list)
    for episode, turns in index.turns.items():
        for turn in turns:
            found[episode, turn.turn].append(turn)
    return found


def _see(index: RunIndex) -> _Seen:
    seen = _Seen([], [], [], [], [], [], [], [], [], 0, 0, 0.0, 0, 0, 0)
    by_episode: dict[str, list[Turn]] = defaultdict(list)
    for (episode, _), found in sorted(_turns(index).items()):
        by_episode[episode].append(found[0])
    for turns in by_episode.values():
        _see_turns(turns, seen)
    for episode, ends in index.finished.items():
        label = index.label(episode)
        if label is not None and label.label.outcome.valid:
            seen.turns.append(float(max(1, ends[0].turns)))
        seen.verify.extend(_lengths(ends[0].intervals, EpisodeState.VERIFY))
    for group in index.opened:
        _see_group(index, group, seen)
    return _see_boxes(index, by_episode, seen)


def _see_turns(turns: list[Turn], seen: _Seen) -> None:
    seen.prompt.append(float(turns[0].prompt_tokens))
    for turn in turns:
        seen.sampled.append(float(turn.sampled_tokens))
        seen.tool.extend(_lengths(turn.intervals, EpisodeState.TOOL))
    for turn, after in pairwise(turns):
        grown = after.prompt_tokens - turn.prompt_tokens - turn.sampled_tokens
        if after.turn == turn.turn + 1 and grown > 0:
            seen.observation.append(float(grown))


def _see_group(index: RunIndex, group: str, seen: _Seen) -> None:
    siblings = range(index.size(group))
    labels = [x.label for n in siblings if (x := index.outcome(group, n)) is not None]
    valid = [x.outcome is Outcome.MODEL_SUCCESS for x in labels if x.outcome.valid]
    if valid:
        seen.passes.append(fmean(valid))
    firsts = [
        turn
        for n in siblings
        for turn in index.turns.get(f"{group}.{n}.0", ())[:1]
        if turn.turn == 0
    ]
    if firsts:
        seen.shared.append(float(min(turn.cached_tokens for turn in firsts)))


def _see_boxes(index: RunIndex, by_episode: dict[str, list[Turn]], seen: _Seen) -> _Seen:
    """Starts, losses, box-seconds, most boxes at once."""
    starts = failed = lost = 0
    box_s = 0.0
    changes: list[tuple[float, int]] = []
    for attempts in index.attempts.values():
        for events in attempts.values():
            episode = events[0].key.id
            known = {turn.turn for turn in by_episode.get(episode, ())}
            intervals = [i for event in events for i in stretches(event, known)]
            boxes = [i for i in intervals if i.state is EpisodeState.BOX_START]
            seen.box.extend(_lengths(boxes, EpisodeState.BOX_START))
            label = index.label(episode)
            infra = label is not None and label.label.outcome is Outcome.INFRA_FAILURE
            starts += max(1, len(boxes))
            failed += infra and not boxes
            lost += len(index.restored.get(episode, ())) + (infra and bool(boxes))
            if boxes:
                end = max(i.end_unix_s for i in intervals)
                box_s += end - boxes[0].end_unix_s
                changes += [(boxes[0].start_unix_s, 1), (end, -1)]
    now = most = 0
    for _, by in sorted(changes):
        now += by
        most = max(most, now)
    contexts = [t.prompt_tokens + t.sampled_tokens for turns in by_episode.values() for t in turns]
    return replace(
        seen,
        starts=starts,
        starts_failed=int(failed),
        box_s=box_s,
        lost=int(lost),
        context_max=max(contexts, default=0),
        boxes_most=most,
    )


def _lengths(intervals: Sequence[StateInterval], state: EpisodeState) -> Iterator[float]:
    for i in intervals:
        if i.state is state and i.end_unix_s > i.start_unix_s:
            yield i.end_unix_s - i.start_unix_s


def _regime(
    index: RunIndex, seen: _Seen, given: Given, turns: Sequence[Turn], notes: list[str]
) -> Regime:
    members = [len(index.batch(step).members) for step in sorted(index.steps)]
    sizes = [index.size(group) for group in index.opened]
    cold = [s for s in seen.box if s >= _COLD_S]
    warm = [s for s in seen.box if s < _COLD_S]
    prompt = median(seen.prompt)
    shared = min(median(seen.shared) if seen.shared else 0.0, prompt)
    turns_max = given.turns_max or int(max(seen.turns))
    limits = [intent.timeout_s for found in index.intended.values() for intent in found]
    step_limit_s = max(limits, default=TB_LIKE.step_limit_s) or TB_LIKE.step_limit_s
    alpha, beta = _beta(seen.passes)
    kv_tokens = max(given.kv_tokens or TB_LIKE.kv_tokens, seen.context_max + _ROOM_TOKENS)
    if given.kv_tokens is None:
        notes.append("the record does not tell the KV tokens of a replica: name them (--kv-tokens)")
    if given.boxes is None:
        notes.append("the number of boxes is taken to be the most that lived at once")
    return Regime(
        name=index.record.run,
        turns=_spread("turns per episode", seen.turns, TB_LIKE.turns, notes, cap=turns_max),
        turns_max=turns_max,
        observation=_spread("observations", seen.observation, TB_LIKE.observation, notes),
        sampled=_spread("replies", seen.sampled, TB_LIKE.sampled, notes),
        tool=_spread("tool times", seen.tool, TB_LIKE.tool, notes, cap=step_limit_s),
        verify=_spread("verifications", seen.verify, TB_LIKE.verify, notes),
        hazard_per_s=seen.lost / seen.box_s if seen.box_s else 0.0,
        boxes=given.boxes or max(1, seen.boxes_most),
        groups=round(median(members)) if members else 1,
        group_size=round(median(sizes)),
        context_limit=min(given.context_limit or TB_LIKE.context_limit, kv_tokens - _ROOM_TOKENS),
        system_tokens=int(shared),
        group_tokens=int(prompt - shared),
        step_limit_s=step_limit_s,
        cold=_spread("cold box starts", cold, TB_LIKE.cold, notes),
        warm_s=median(warm) if warm else TB_LIKE.warm_s,
        start_failure=seen.starts_failed / max(1, seen.starts),
        pass_alpha=alpha,
        pass_beta=beta,
        replicas=max(1, len({turn.replica for turn in turns if turn.replica})),
        kv_tokens=kv_tokens,
    )


def _spread(
    name: str, values: Sequence[float], given: Spread, notes: list[str], *, cap: float = math.inf
) -> Spread:
    """Log-normal through the recorded values."""
    found = sorted(value for value in values if value > 0)
    if len(found) < _SAMPLES_MIN:
        notes.append(f"too few {name} were recorded: the published spread stands")
        return given
    middle = median(found)
    if sum(value >= cap for value in found) > _CAPPED * len(found):
        low = found[round(0.1587 * (len(found) - 1))]
        return Spread(middle, math.log(middle / low))
    logs = [math.log(value) for value in found]
    return Spread(math.exp(fmean(logs)), pstdev(logs))


def _beta(passes: Sequence[float]) -> tuple[float, float]:
    """Pass rates of tasks: their mean and spread by moments; the published one without any."""
    if len(passes) < _SAMPLES_MIN:
        return TB_LIKE.pass_alpha, TB_LIKE.pass_beta
    mean = min(max(fmean(passes), 0.01), 0.99)
    variance = max(pstdev(passes) ** 2, 1e-4)
    both = min(max(mean * (1 - mean) / variance - 1, 0.1), 100.0)
    return mean * both, (1 - mean) * both


def _workload_goodness(regime: Regime, seen: _Seen) -> dict[str, Goodness]:
    """Recorded against drawn from the model, by quantity."""
    workload = Workload(regime, seed=0)
    plans = [workload.plan(g, s, 0) for g in range(_GROUPS) for s in range(regime.group_size)]
    drawn = {
        "turns": [float(len(plan.turns)) for plan in plans],
        "observation_tokens": [float(t.observation_tokens) for p in plans for t in p.turns[:-1]],
        "sampled_tokens": [float(t.sampled_tokens) for p in plans for t in p.turns],
        "tool_s": [t.tool_s for p in plans for t in p.turns],
        "verify_s": [plan.verify_s for plan in plans if plan.verify_s],
        "cold_start_s": [plan.box_start_s for plan in plans],
    }
    recorded = {
        "turns": seen.turns,
        "observation_tokens": seen.observation,
        "sampled_tokens": seen.sampled,
        "tool_s": seen.tool,
        "verify_s": seen.verify,
        "cold_start_s": [s for s in seen.box if s >= _COLD_S],
    }
    return {
        name: Goodness(len(values), _quantiles(values), _quantiles(drawn[name]))
        for name, values in recorded.items()
        if values and drawn[name]
    }


def _engine_goodness(engine: EngineFit) -> dict[str, Goodness]:
    """Prefills with what ran beside them; decodes per step."""
    found = {
        "prefill_s": [(f, took, 1.0) for f, took in engine.prefill],
        "step_s": [(f, took, f[3]) for f, took in engine.step],
    }
    return {
        name: Goodness(
            len(rows),
            _quantiles([took / steps for _, took, steps in rows]),
            _quantiles([seconds(engine.costs, f) / steps for f, _, steps in rows]),
        )
        for name, rows in found.items()
        if rows
    }


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    found = sorted(values)
    low, middle, high = (found[round(q * (len(found) - 1))] for q in (0.1, 0.5, 0.9))
    return low, middle, high
