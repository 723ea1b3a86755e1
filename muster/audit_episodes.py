"""Audit rules for groups and episodes: each trajectory stands exactly once, repairs are linked.

Owns: what must hold between group, turn, end and label. Promise: one function per rule, each
yields a finding per breach. Pure. Does not cover: batches, fates, versions (audit_batches.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from muster.finding import Finding, problem
from muster.record import Finish, Opened, Turn
from muster.run_index import Place, RunIndex, order
from muster.types import Fate


def check(index: RunIndex) -> Iterator[Finding]:
    """Every rule on every job, group, sibling and attempt."""
    yield from _jobs(index)
    for group, records in index.opened.items():
        yield from _group(index, group, records)
    for episode in sorted({*index.turns, *index.finished, *index.labels}):
        yield from _once(index, episode)
        yield from _turns(index, episode)
    for place, attempts in index.attempts.items():
        yield from _place(index, place)
        yield from _links(index, place, attempts)
    yield from _epochs(index)


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
    if ends and any(order(t.at) > order(ends[0].at) for t in turns):
        yield problem("a turn was written after the end", where)


def _place(index: RunIndex, place: Place) -> Iterator[Finding]:
    group, sibling = place
    where = f"sibling {group}.{sibling}"
    if group not in index.opened:
        yield problem("its group was never opened", where)
    elif not 0 <= sibling < index.size(group):
        yield problem(f"the group has only {index.size(group)} siblings", where)


def _links(
    index: RunIndex, place: Place, attempts: dict[int, list[Turn | Finish]]
) -> Iterator[Finding]:
    """An attempt may exist only after the former one ended, or lost its owner.

    Attempts that left no event had an owner too: for each one that did not end, the epoch must
    have grown since.
    """
    group, sibling = place
    known = sorted(attempts)
    for former, attempt in zip([None, *known[:-1]], known, strict=True):
        where = f"episode {group}.{sibling}.{attempt}"
        first = attempts[attempt][0]
        if former is None:
            before = index.opened[group][0].key.owner_epoch if group in index.opened else 0
            open_ended, ended = attempt, False
        else:
            events = [e for e in attempts[former] if order(e.at) < order(first.at)]
            before = events[-1].key.owner_epoch if events else first.key.owner_epoch
            ended = any(isinstance(e, Finish) for e in events)
            open_ended = attempt - former - ended
        if first.key.owner_epoch - before < open_ended:
            yield problem(
                f"begun while attempt {attempt - 1} was running under the same owner", where
            )
        labels = index.labels.get(f"{group}.{sibling}.{former}", [])
        if ended and any(label.label.outcome.valid for label in labels):
            yield problem(f"repeats attempt {former}, which had a valid outcome", where)


def _epochs(index: RunIndex) -> Iterator[Finding]:
    """Within a group no event of an older owner follows one of a newer."""
    events: list[Opened | Turn | Finish] = [
        *index.record.opened,
        *index.record.turns,
        *index.record.finished,
    ]
    newest: dict[str, int] = {}
    for event in sorted(events, key=lambda e: order(e.at)):
        group, epoch = event.key.group, event.key.owner_epoch
        if epoch < newest.get(group, epoch):
            yield problem(
                f"written by owner epoch {epoch} after {newest[group]} had taken over",
                f"stream events {event.at}",
            )
        newest[group] = max(epoch, newest.get(group, epoch))
