"""An evaluation's result, and what there is to doubt about it.

Owns: the result as a whole, its warnings. Promise: pure; each field of the serving and each
sampling parameter in which the evaluation differs from the training rollouts is named with both
values; that there was nothing to compare with is said, and is no likeness. Does not cover: the
figures (evaluation.py), the comparison of engines (fingerprint.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from muster.evaluated import EvaluatedGroup
from muster.evaluation import (
    Asked,
    EvaluationResult,
    Serving,
    Training,
    overall_of,
    tasks_of,
    versions_of,
)
from muster.fingerprint import ServingFingerprint, differences, text
from muster.types import SamplingParams

SAMPLED_UNKNOWN = "unknown how the training rollouts were sampled: nothing was compared"
SERVED_UNKNOWN = "unknown how the training rollouts were served: nothing was compared"
_SAMPLING = ("temperature", "top_p", "top_k")


def result(
    asked: Asked,
    groups: Sequence[EvaluatedGroup],
    serving: Sequence[Serving],
    training: Training,
) -> EvaluationResult:
    """Of the groups that have ended so far."""
    tasks = tasks_of(groups)
    complete = len(groups) >= asked.groups
    ended = max((group.complete_unix_s for group in groups), default=asked.submitted_unix_s)
    found = EvaluationResult(
        asked=asked,
        complete=complete,
        overall=overall_of(tasks, groups),
        tasks=tasks,
        versions=versions_of(groups),
        serving=tuple(serving),
        training=training,
        warnings=(),
        wall_s=max(0.0, ended - asked.submitted_unix_s),
    )
    return _with(found, groups)


def compared(found: EvaluationResult, training: Training) -> EvaluationResult:
    """The same result, held against a training that its own run knows nothing of."""
    known = [d for d in found.warnings if d not in (SAMPLED_UNKNOWN, SERVED_UNKNOWN)]
    doubts = (
        *known,
        *sampling_doubts(found.asked.sampling, training),
        *(d for d in serving_doubts(found.serving, training.serving) if d not in known),
    )
    return replace(found, training=training, warnings=doubts)


def _with(found: EvaluationResult, groups: Sequence[EvaluatedGroup]) -> EvaluationResult:
    return replace(found, warnings=tuple(_doubts(found, groups)))


def _doubts(found: EvaluationResult, groups: Sequence[EvaluatedGroup]) -> Iterator[str]:
    missing = found.asked.groups - len(groups)
    if missing > 0:
        yield f"{missing} of {found.asked.groups} groups are not in it: the job is {_state(found)}"
    if found.overall.infra:
        yield (
            f"{found.overall.infra} of {found.overall.samples} samples failed by infrastructure: "
            "they are in no figure"
        )
    versions = sorted({version for group in groups for version in group.versions})
    if len(versions) > 1:
        named = ", ".join(map(str, versions))
        yield (
            f"it spans policy versions {named}: a trainer published meanwhile; the figures by "
            "version tell them apart"
        )
    yield from sampling_doubts(found.asked.sampling, found.training)
    yield from serving_doubts(found.serving, found.training.serving)


def _state(found: EvaluationResult) -> str:
    state = found.asked.state
    return state if state != "done" else "done, and older results have left Redis"


def sampling_doubts(sampling: SamplingParams, training: Training) -> Iterator[str]:
    """A line for each parameter that differs, or that there was nothing to compare with."""
    if training.sampling is None:
        yield SAMPLED_UNKNOWN
        return
    for name in _SAMPLING:
        here, there = getattr(sampling, name), getattr(training.sampling, name)
        if here != there:
            yield f"sampling differs from training: {name}: {here:g} here, {there:g} there"


def serving_doubts(
    serving: Sequence[Serving], training: Sequence[ServingFingerprint]
) -> Iterator[str]:
    """A line for each field in which a replica differs from the engines of training, or that
    nothing is known of those."""
    silent = [one.replica for one in serving if one.fingerprint is None]
    if silent or not serving:
        yield f"unknown how it was served: {', '.join(silent) or 'no replica'} does not say"
    kinds = {one.fingerprint: one.replica for one in serving if one.fingerprint is not None}
    first = next(iter(kinds), None)
    for other in list(kinds)[1:]:
        assert first is not None
        for line in differences(first, other):
            yield f"replicas {kinds[first]} and {kinds[other]} differ in {line}"
    if not training:
        yield SERVED_UNKNOWN
    for kind, replica in kinds.items():
        if not training or kind in training:
            continue
        nearest = min(training, key=lambda known: len(differences(kind, known)))
        for line in differences(kind, nearest):
            yield f"served otherwise than in training: {line} (replica {replica} first)"
    if len(training) > 1:
        told = "; ".join(map(text, training))
        yield f"engines of {len(training)} kinds served the training rollouts: {told}"
