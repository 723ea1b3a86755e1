"""A run's record by group, episode, step and version.

Owns: grouping, order of stream ids, the version lineage. Promise: nothing is dropped; lists keep
stream order, so a duplicate stays visible as a list of two, of which the first counts, as in the
bank. Pure. Does not cover: judgement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from muster.entries import (
    Batch,
    EvaluatedOf,
    FateOf,
    Finish,
    Intended,
    Job,
    Labelled,
    Member,
    Opened,
    Restored,
    RunRecord,
    Turn,
    Version,
)
from muster.stream_ids import id_order, id_unix_s
from muster.types import Fate

ROOT_VERSION = 0
Place = tuple[str, int]  # group, sibling
Event = Intended | Turn | Restored | Finish


class RunIndex:
    """Look-ups over one RunRecord."""

    def __init__(self, record: RunRecord):
        self.record = record
        self.opened: dict[str, list[Opened]] = defaultdict(list)
        self.intended: dict[str, list[Intended]] = defaultdict(list)
        self.turns: dict[str, list[Turn]] = defaultdict(list)
        self.restored: dict[str, list[Restored]] = defaultdict(list)
        self.finished: dict[str, list[Finish]] = defaultdict(list)
        self.labels: dict[str, list[Labelled]] = defaultdict(list)
        self.attempts: dict[Place, dict[int, list[Event]]] = defaultdict(dict)
        self.by_group: dict[str, dict[int, dict[int, list[Event]]]] = defaultdict(dict)
        self.fates: dict[str, list[FateOf]] = defaultdict(list)
        self.frozen: dict[int, list[Batch]] = defaultdict(list)
        self.short: dict[int, list[Batch]] = defaultdict(list)  # what stays after a return
        self.trained: dict[int, list[Batch]] = defaultdict(list)
        self.versions: dict[int, list[Version]] = defaultdict(list)
        self._made: dict[int, list[Version]] = defaultdict(list)
        self.jobs: dict[str, list[Job]] = defaultdict(list)
        self.evaluated: dict[str, list[EvaluatedOf]] = defaultdict(list)
        self._fill(record)

    def _fill(self, record: RunRecord) -> None:
        for o in record.opened:
            self.opened[o.key.group].append(o)
        for fate in record.fates:
            self.fates[fate.group].append(fate)
        for batch in record.batches:
            of_stage = self.short if batch.short else self.trained if batch.trained else self.frozen
            of_stage[batch.step].append(batch)
        for version in record.versions:
            self.versions[version.version].append(version)
        for first in (records[0] for records in self.versions.values()):
            if first.step is not None:
                self._made[first.step.step].append(first)
        for job in record.jobs:
            self.jobs[job.job].append(job)
        for evaluated in record.evaluated:
            self.evaluated[evaluated.found.group].append(evaluated)
        self._fill_episodes(record)

    def _fill_episodes(self, record: RunRecord) -> None:
        of_episodes: tuple[tuple[dict[str, list[Any]], Sequence[Any]], ...] = (
            (self.intended, record.intended),
            (self.turns, record.turns),
            (self.restored, record.restored),
            (self.finished, record.finished),
            (self.labels, record.labels),
        )
        for by_episode, entries in of_episodes:
            for entry in entries:
                by_episode[entry.key.id].append(entry)
        events: list[Event] = list(record.intended)
        events += record.turns
        events += record.restored
        events += record.finished
        for event in sorted(events, key=lambda e: id_order(e.at)):
            by_attempt = self.attempts[event.key.group, event.key.sibling]
            by_attempt.setdefault(event.key.attempt, []).append(event)
        for place, attempts in self.attempts.items():
            self.by_group[place[0]][place[1]] = attempts

    def size(self, group: str) -> int:
        """Siblings that the group was opened with; 0 when it never was."""
        return self.opened[group][0].group_size if group in self.opened else 0

    def evaluates(self, group: str) -> bool:
        """True when the group was opened for an evaluation."""
        return group in self.opened and self.opened[group][0].evaluates

    def newest_finished(self, group: str, sibling: int) -> int | None:
        """The newest attempt of that sibling that has ended."""
        by_attempt = self.attempts.get((group, sibling), {})
        ended = [a for a, events in by_attempt.items() if any(map(_is_finish, events))]
        return max(ended, default=None)

    def outcome(self, group: str, sibling: int) -> Labelled | None:
        """The label of the newest attempt that has ended."""
        attempt = self.newest_finished(group, sibling)
        return self.label(f"{group}.{sibling}.{attempt}")

    def label(self, episode: str) -> Labelled | None:
        """The first label recorded: it is the one that the bank keeps."""
        found = self.labels.get(episode, ())
        return found[0] if found else None

    def fate(self, group: str) -> FateOf | None:
        """The first fate recorded."""
        return self.fates[group][0] if group in self.fates else None

    def cancelled(self, job: str) -> bool:
        """True when somebody cancelled it."""
        return any(record.cancelled for record in self.jobs.get(job, ()))

    @property
    def steps(self) -> set[int]:
        """Of all batches, frozen or trained, or to be topped up."""
        return {*self.frozen, *self.trained, *self.short}

    def in_batches(self, *, trained: bool = False) -> dict[str, list[int]]:
        """Steps of the batches (or of the trained ones alone) that hold each group."""
        held: dict[str, list[int]] = defaultdict(list)
        for step in sorted(self.trained if trained else self.steps):
            for group in {m.group for m in self.batch(step).members}:
                held[group].append(step)
        return held

    def brought_back(self, fate: FateOf, step: int) -> bool:
        """The group was filtered while the record of its batch was lost; then a trainer brought
        that batch, which is older than the fate. The group keeps it (docs/adr/0006)."""
        if fate.fate is not Fate.FILTERED:
            return False
        first, told = self._first(step), id_order(fate.at)
        return told < id_order(first.at) and first.asked_unix_s < id_unix_s(fate.at)

    def batch(self, step: int) -> Batch:
        """The record of a step that says most: trained if there is one; else of the newest
        revision, what was frozen."""
        if step in self.trained:
            return self.trained[step][-1]
        found: list[Batch] = [*self.short.get(step, ()), *self.frozen.get(step, ())]
        return max(found, key=lambda batch: (batch.revision, not batch.short))

    def _first(self, step: int) -> Batch:
        return (self.frozen.get(step) or self.short.get(step) or self.trained[step])[0]

    def member_ids(self, members: Iterable[Member]) -> list[str]:
        """Episode ids that a batch trains on."""
        return [
            f"{m.group}.{sibling}.{attempt}"
            for m in members
            for sibling, attempt in enumerate(m.attempts)
        ]

    def parents(self) -> dict[int, int]:
        """Parent of every recorded version."""
        return {v: records[0].parent for v, records in self.versions.items()}

    def made_by(self, step: int) -> list[Version]:
        """Versions that the optimizer step made; several after a return to an old checkpoint."""
        return self._made.get(step, [])

    def base(self, batch: Batch) -> int:
        """The version that the batch was trained on, as far as it is recorded."""
        made = self.made_by(batch.step)
        return made[-1].parent if made else batch.policy_version

    def lineage(self, batch: Batch) -> set[int]:
        """Versions whose tokens the batch may hold: ancestors of what it was trained on."""
        heads = {batch.policy_version, *(v.parent for v in self.made_by(batch.step))}
        parents = self.parents()
        return {v for head in heads for v in chain(parents, head)}

    def fated(self, fate: Fate) -> list[str]:
        """Groups whose first fate is that one."""
        return [g for g, fates in self.fates.items() if fates[0].fate is fate]


def chain(parents: Mapping[int, int], version: int) -> list[int]:
    """The version, its parent, and so on, as far as is recorded; never endless."""
    return list(_ancestry(parents, version))


def _ancestry(parents: Mapping[int, int], version: int) -> Iterator[int]:
    seen = {version}
    yield version
    while version in parents and version != ROOT_VERSION:
        version = parents[version]
        if version in seen or version < ROOT_VERSION:
            return
        seen.add(version)
        yield version


def lag(parents: Mapping[int, int], old: int, new: int) -> int | None:
    """Versions between `old` and `new` along the lineage; None when `old` is not its ancestor."""
    return next((n for n, v in enumerate(_ancestry(parents, new)) if v == old), None)


def _is_finish(event: Event) -> bool:
    return isinstance(event, Finish)
