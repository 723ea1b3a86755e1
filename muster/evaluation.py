"""The figures of an evaluation: pass rates with intervals, by task and version, and what to doubt.

Owns: how groups become figures, names and units of the result. Promise: pure and deterministic
(the bootstrap has a fixed seed); samples that infrastructure ended are counted and enter no figure;
a sample without a verdict of success is a failure, whatever it lacked. Fields are only ever added:
`format` says which set it is. Does not cover: the warnings (evaluation_doubts.py), collecting.

Intervals are 95 %. Of one task: Wilson's over its valid samples. Over tasks: percentile bootstrap
of the mean of the tasks' rates, tasks drawn with replacement: tasks differ more than samples do.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from muster.evaluated import EvaluatedGroup, EvaluatedSibling
from muster.fingerprint import ServingFingerprint
from muster.types import Outcome, SamplingParams, Value

_Z = 1.959963984540054  # two-sided 95 % of the normal distribution
_DRAWS = 2000


class Interval(Value, frozen=True):
    """95 %, both ends included."""

    low: float
    high: float


class TaskFigures(Value, frozen=True):
    """One task, all its instances together. Means are over valid samples; None without any."""

    task: str
    groups: int
    samples: int
    valid: int
    passed: int
    infra: int  # samples that infrastructure ended for good: in no other figure
    repaired: int  # attempts that infrastructure ended and that were made again
    pass_rate: float | None
    pass_interval: Interval | None
    reward_mean: float | None
    turns_mean: float | None
    sampled_tokens_mean: float | None
    prompt_tokens_mean: float | None
    outcomes: dict[str, int]  # "outcome/cause" → samples
    instances: tuple[str, ...] = ()  # names, when there are parameters


class VersionFigures(Value, frozen=True):
    """Samples whose tokens came from these policy versions; each one voice, Wilson's interval."""

    versions: tuple[int, ...]  # one, or those that a publication fell between
    samples: int
    valid: int
    passed: int
    pass_rate: float | None
    pass_interval: Interval | None
    reward_mean: float | None


class Overall(Value, frozen=True):
    """All tasks. The pass rate is the mean of the tasks' pass rates, each task one voice."""

    tasks: int
    tasks_solved: int  # by one sample at least
    samples: int
    valid: int
    passed: int
    infra: int
    repaired: int
    pass_rate: float | None
    pass_interval: Interval | None
    reward_mean: float | None
    turns_mean: float | None
    sampled_tokens_mean: float | None
    sampled_tokens: int


class Serving(Value, frozen=True):
    """How one replica serves; `fingerprint` None: it does not say."""

    replica: str
    fingerprint: ServingFingerprint | None
    told: str = ""  # its own words


class Asked(Value, frozen=True):
    """What was evaluated: `groups` of `group_size` samples each."""

    run: str
    job: str
    state: str  # running, done or cancelled
    sampling: SamplingParams
    groups: int
    group_size: int
    submitted_unix_s: float
    model: str = ""  # the folder, when one was named


class Training(Value, frozen=True):
    """What to compare with: the run's newest training job, and the engines that served the run."""

    job: str = ""
    sampling: SamplingParams | None = None
    serving: tuple[ServingFingerprint, ...] = ()


class EvaluationResult(Value, frozen=True):
    """All of it. `complete`: every group that was asked for is in it."""

    asked: Asked
    complete: bool
    overall: Overall
    tasks: tuple[TaskFigures, ...]  # by name
    versions: tuple[VersionFigures, ...]
    serving: tuple[Serving, ...]
    training: Training
    warnings: tuple[str, ...]
    wall_s: float  # from the submission to the last sample's end
    format: int = 1


def overall_of(tasks: Sequence[TaskFigures], groups: Sequence[EvaluatedGroup]) -> Overall:
    siblings = [s for group in groups for s in group.siblings]
    valid = [s for s in siblings if s.label.outcome.valid]
    rates = [task.pass_rate for task in tasks if task.pass_rate is not None]
    return Overall(
        tasks=len(tasks),
        tasks_solved=sum(task.passed > 0 for task in tasks),
        samples=len(siblings),
        valid=len(valid),
        passed=sum(map(_passed, valid)),
        infra=len(siblings) - len(valid),
        repaired=sum(s.attempt for s in siblings),
        pass_rate=fmean(rates) if rates else None,
        pass_interval=bootstrap(rates),
        reward_mean=_mean(map(_reward, valid)),
        turns_mean=_mean(s.turns for s in valid),
        sampled_tokens_mean=_mean(s.sampled_tokens for s in valid),
        sampled_tokens=sum(s.sampled_tokens for s in siblings),
    )


def tasks_of(groups: Sequence[EvaluatedGroup]) -> tuple[TaskFigures, ...]:
    """By the name before `@`, which says the instance."""
    by_task: dict[str, list[EvaluatedGroup]] = {}
    for group in groups:
        by_task.setdefault(group.task.partition("@")[0], []).append(group)
    return tuple(_task(name, by_task[name]) for name in sorted(by_task))


def _task(name: str, groups: Sequence[EvaluatedGroup]) -> TaskFigures:
    siblings = [s for group in groups for s in group.siblings]
    valid = [s for s in siblings if s.label.outcome.valid]
    passed = sum(map(_passed, valid))
    return TaskFigures(
        task=name,
        groups=len(groups),
        samples=len(siblings),
        valid=len(valid),
        passed=passed,
        infra=len(siblings) - len(valid),
        repaired=sum(s.attempt for s in siblings),
        pass_rate=passed / len(valid) if valid else None,
        pass_interval=wilson(passed, len(valid)),
        reward_mean=_mean(map(_reward, valid)),
        turns_mean=_mean(s.turns for s in valid),
        sampled_tokens_mean=_mean(s.sampled_tokens for s in valid),
        prompt_tokens_mean=_mean(s.prompt_tokens for s in valid),
        outcomes=dict(
            Counter(f"{s.label.outcome}/{s.label.cause}" for s in siblings).most_common()
        ),
        instances=tuple(sorted({group.task for group in groups if group.task != name})),
    )


def versions_of(groups: Sequence[EvaluatedGroup]) -> tuple[VersionFigures, ...]:
    """Rising; samples without a token are of no version."""
    found: dict[tuple[int, ...], list[EvaluatedSibling]] = {}
    for sibling in (s for group in groups for s in group.siblings if s.versions):
        found.setdefault(sibling.versions, []).append(sibling)
    return tuple(_version(versions, found[versions]) for versions in sorted(found))


def _version(versions: tuple[int, ...], siblings: Sequence[EvaluatedSibling]) -> VersionFigures:
    valid = [s for s in siblings if s.label.outcome.valid]
    passed = sum(map(_passed, valid))
    return VersionFigures(
        versions,
        len(siblings),
        len(valid),
        passed,
        passed / len(valid) if valid else None,
        wilson(passed, len(valid)),
        _mean(map(_reward, valid)),
    )


def wilson(passed: int, of: int) -> Interval | None:
    """Of a share; None without a sample. Wilson (1927), without correction for continuity."""
    if not of:
        return None
    rate, z2 = passed / of, _Z * _Z
    centre = (rate + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z * math.sqrt(rate * (1 - rate) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    # Rounding must not leave the point outside its own interval.
    return Interval(max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half)))


def bootstrap(rates: Sequence[float], draws: int = _DRAWS) -> Interval | None:
    """Of the mean of the tasks' rates; None for fewer than two tasks."""
    if len(rates) < 2:
        return None
    chance = random.Random(len(rates))
    means = sorted(fmean(chance.choices(rates, k=len(rates))) for _ in range(draws))
    return Interval(means[int(0.025 * draws)], means[math.ceil(0.975 * draws) - 1])


def _passed(sibling: EvaluatedSibling) -> bool:
    return sibling.label.outcome is Outcome.MODEL_SUCCESS


def _reward(sibling: EvaluatedSibling) -> float:
    return sibling.label.reward or 0.0


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
