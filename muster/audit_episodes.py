"""Audit rules for groups and episodes: each trajectory stands exactly once.

Owns: what must hold between job, group, turn, end and label. Promise: one function per rule, each
yields a finding per breach. Pure. Does not cover: chains of attempts, intents, boxes
(audit_attempts.py), batches, fates, versions (audit_batches.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from muster.entries import Finish, Opened, Turn
from muster.finding import Finding, problem
from muster.run_index import Place, RunIndex
from muster.stream_ids import id_order
from muster.types import Fate


def check(index: RunIndex) -> Iterator[Finding]:
    """Every rule on every job, group, sibling and attempt."""
    yield from _jobs(index)
    for group, records in index.opened.items():
        yield from _group(index, group, records)
    for episode in sorted({*index.intended, *index.turns, *index.finished, *index.labels}):
        yield from _once(index, episode)
        yield from _turns(index, episode)
    for place in index.attempts:
        yield from _place(index, place)
    for group, fates in index.fates.items():
        if fates[0].fate is not Fate.TRAINED and not _cancelled(index, group):
            yield from _ended(index, group, fates[0].fate)


def _jobs(index: RunIndex) -> Iterator[Finding]:
    for job, records in index.jobs.items():
        if len({(r.groups, r.group_size) for r in records if not r.cancelled}) > 1:
            yield problem("recorded with different sizes", f"job {job}")
    opened = Counter(records[0].job for records in index.opened.values())
    filtered = Counter(
        records[0].job for group, records in index.opened.items() if _filtered(index, group)
    )
    for job, groups in opened.items():
        if job not in index.jobs:
            yield problem(f"{groups} groups were opened for it, but it was not recorded", _job(job))
            continue
        asked = index.jobs[job][0].groups
        replaced = min(filtered[job], asked)  # a filtered group is replaced, once per group asked
        if groups > asked + replaced:
            yield problem(f"{groups} groups opened, {asked} asked, {replaced} replaced", _job(job))


def _filtered(index: RunIndex, group: str) -> bool:
    return any(fate.fate is Fate.FILTERED for fate in index.fates.get(group, ()))


def _job(job: str) -> str:
    return f"job {job}"


def _group(index: RunIndex, group: str, records: list[Opened]) -> Iterator[Finding]:
    where = f"group {group}"
    if len(records) > 1:
        yield problem(f"opened {len(records)} times", where)
    job = index.jobs.get(records[0].job)
    if job and job[0].group_size != records[0].group_size:
        yield problem(
            f"opened with {records[0].group_size} siblings, its job asks {job[0].group_size}", where
        )


def _once(index: RunIndex, episode: str) -> Iterator[Finding]:
    where = f"episode {episode}"
    ends, labels = index.finished.get(episode, []), index.labels.get(episode, [])
    if len(ends) > 1:
        yield problem(f"finished {len(ends)} times", where)
    if len(labels) > 1:
        yield problem(f"labelled {len(labels)} times", where)
    if ends and not labels:
        yield problem("finished, but has no label", where)
    if labels and not ends:
        yield problem("labelled, but its end is lost", where)


def _turns(index: RunIndex, episode: str) -> Iterator[Finding]:
    where = f"episode {episode}"
    turns, ends = index.turns.get(episode, []), index.finished.get(episode, [])
    seen = Counter(t.turn for t in turns)
    expected = ends[0].turns if ends else max(seen, default=-1) + 1
    for turn in sorted({*seen, *range(expected)}):
        if seen[turn] == 0:
            yield problem(f"turn {turn} of {expected} is lost", where)
        elif seen[turn] > 1:
            yield problem(f"turn {turn} stands {seen[turn]} times", where)
        if turn >= expected:
            yield problem(f"turn {turn}, but it ended after {expected} turns", where)
    events: list[Turn | Finish] = [*turns, *ends]
    if any(e.seq != (e.turn if isinstance(e, Turn) else e.turns) for e in events):
        yield problem("a sequence number does not fit its turn", where)
    if ends and any(id_order(t.at) > id_order(ends[0].at) for t in turns):
        yield problem("a turn was written after the end", where)


def _cancelled(index: RunIndex, group: str) -> bool:
    """Its job was given up by a person, and with it what was still running."""
    job = index.opened[group][0].job if group in index.opened else ""
    return index.cancelled(job)


def _ended(index: RunIndex, group: str, fate: Fate) -> Iterator[Finding]:
    """What was filtered or evaluated had all its siblings' outcomes; trained ones are checked by
    their batch."""
    for sibling in range(index.size(group)):
        if index.outcome(group, sibling) is None:
            yield problem(f"{fate}, but it has no outcome", f"sibling {group}.{sibling}")


def _place(index: RunIndex, place: Place) -> Iterator[Finding]:
    group, sibling = place
    where = f"sibling {group}.{sibling}"
    if group not in index.opened:
        yield problem("its group was never opened", where)
    elif not 0 <= sibling < index.size(group):
        yield problem(f"the group has only {index.size(group)} siblings", where)
