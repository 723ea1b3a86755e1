"""Which part of a run a person means: the run, a job, a batch, a group, an episode.

Owns: the forms that are understood. Promise: pure; what is not there is answered with what is.
Does not cover: what is said of it (explain.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from muster.errors import InvalidInput, NotFound
from muster.run_index import RunIndex
from muster.types import Value

_GROUPS_MAX = 8


class Kind(StrEnum):
    """What is asked about."""

    RUN = "run"
    JOB = "job"
    BATCH = "batch"
    GROUP = "group"
    EPISODE = "episode"


class Subject(Value, frozen=True):
    """`id`: the run, the job, the step as digits, the group, or group.sibling.attempt."""

    kind: Kind
    id: str


def subject(words: Sequence[str], index: RunIndex) -> Subject:
    """From what a person typed: nothing, the run's name, batch N, a job, a group, a sibling, an
    episode.

    Raises InvalidInput, NotFound.
    """
    words = [w for word in words for w in word.split()]
    if not words or words == [index.record.run]:
        return Subject(Kind.RUN, index.record.run)
    if words[0] == "batch" or (len(words) == 1 and words[0].isdecimal()):
        return _batch_named(words, index)
    if len(words) > 1:
        way_out = "name one: a job, batch N, a group, or an episode GROUP.SIBLING.ATTEMPT"
        raise InvalidInput("several things", field="what", value=" ".join(words), way_out=way_out)
    return _group_or_episode(words[0], index)


def _batch_named(words: Sequence[str], index: RunIndex) -> Subject:
    steps = index.steps
    if words == ["batch"]:
        return Subject(Kind.BATCH, str(max(steps, default=0) + 1))
    if len(words) == 2 - (words[0] != "batch") and words[-1].isdecimal():
        step = int(words[-1])
        if 1 <= step <= max(steps, default=0) + 1:
            return Subject(Kind.BATCH, str(step))
    raise NotFound(
        "there is no such batch",
        field="batch",
        value=" ".join(words[1:]) or words[0],
        way_out=f"batches so far: {max(steps, default=0)}; the next one is `muster explain batch`",
    )


def _group_or_episode(name: str, index: RunIndex) -> Subject:
    if name in index.opened:
        return Subject(Kind.GROUP, name)
    if name in index.jobs:
        return Subject(Kind.JOB, name)
    group, _, rest = name.partition(".")
    numbers = rest.split(".")
    known = group in index.opened and all(n.isdecimal() for n in numbers) and len(numbers) <= 2
    if known and int(numbers[0]) < index.size(group):
        attempts = index.attempts.get((group, int(numbers[0])), {0: []})
        newest = max(attempts)
        attempt = int(numbers[1]) if len(numbers) == 2 else newest
        if attempt > newest + _repairable(group, int(numbers[0]), newest, index):
            way_out = f"attempts count from 0; the newest is {group}.{int(numbers[0])}.{newest}"
            raise NotFound("there is no such attempt", field="what", value=name, way_out=way_out)
        return Subject(Kind.EPISODE, f"{group}.{int(numbers[0])}.{attempt}")
    groups = [g for g in index.opened if g not in index.fates] or list(index.opened)
    known_jobs = ", ".join(list(index.jobs)[-_GROUPS_MAX:]) or "none so far"
    raise NotFound(
        "the run has no such job, group or episode",
        field="what",
        value=name,
        way_out=f"jobs: {known_jobs}; groups: {', '.join(groups[:_GROUPS_MAX]) or 'none so far'}",
    )


def _repairable(group: str, sibling: int, attempt: int, index: RunIndex) -> bool:
    """The attempt ended without a valid outcome: the next one may run, unrecorded as yet."""
    labelled = index.label(f"{group}.{sibling}.{attempt}")
    return labelled is not None and not labelled.label.outcome.valid
