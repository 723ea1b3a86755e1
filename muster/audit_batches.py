"""Audit rules for batches, fates and versions: each group is trained once, whole, with ancestry.

Owns: what must hold between batch, member, fate and version. Promise: one function per rule, each
yields a finding per breach. Pure. Does not cover: episodes within a group (audit_episodes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from muster.entries import Batch, FateOf, Member
from muster.finding import Finding, note, problem
from muster.run_index import ROOT_VERSION, RunIndex
from muster.stream_ids import id_order
from muster.types import Fate


def check(index: RunIndex) -> Iterator[Finding]:
    """Every rule on every batch, fate and version."""
    yield from _steps(index)
    for step in sorted(index.steps):
        yield from _stages(index, step)
        yield from _members(index, index.batch(step))
    for group, steps in index.in_batches().items():
        if len(steps) > 1:
            yield problem(f"stands in batches {', '.join(map(str, steps))}", f"group {group}")
    yield from _fates(index)
    yield from _versions(index)
    for step in index.trained:
        yield from _ancestry(index, index.batch(step))


def _steps(index: RunIndex) -> Iterator[Finding]:
    steps = index.steps
    first = 1 if index.record.whole else min(steps, default=1)
    for step in range(first, max(steps, default=0)):
        if step not in steps:
            yield problem("there is no such batch, but later ones", f"batch {step}")
    for step in sorted(s for s in steps if s < 1):
        yield problem("steps begin at 1", f"batch {step}")


def _stages(index: RunIndex, step: int) -> Iterator[Finding]:
    where = f"batch {step}"
    frozen, trained = index.frozen.get(step, []), index.trained.get(step, [])
    if not frozen and index.record.whole:
        yield problem("trained, but its composition was never frozen", where)
    yield from _compositions(index, step, where)
    if frozen and trained and id_order(trained[0].at) < id_order(frozen[0].at):
        yield problem("trained before it was frozen", where)


def _compositions(index: RunIndex, step: int, where: str) -> Iterator[Finding]:
    """One of each revision; a revision has all that stayed of the former one, and the trained one
    is the newest."""
    frozen, trained = index.frozen.get(step, []), index.trained.get(step, [])
    short = index.short.get(step, [])
    newest = max((b.revision for b in (*frozen, *short)), default=0)
    for revision in sorted({b.revision for b in (*frozen, *trained, *short)}):
        mine = [b for b in (*frozen, *trained) if b.revision == revision]
        if len({b.members for b in mine}) > 1:
            yield problem("its composition changed after it was frozen", where)
        elif (times := Counter(b.trained for b in mine)) and max(times.values()) > 1:
            told = f"frozen {times[False]} times, trained {times[True]} times, unchanged"
            yield note(told, where)
        if revision:
            yield from _revision(index, step, revision, where)
    if trained and index.record.whole and trained[-1].revision != newest:
        yield problem(f"revision {trained[-1].revision} was trained, {newest} is the newest", where)


def _revision(index: RunIndex, step: int, revision: int, where: str) -> Iterator[Finding]:
    """What groups were given back of it, and what stayed."""
    before = [b for b in index.frozen.get(step, ()) if b.revision == revision - 1]
    after = [b for b in index.frozen.get(step, ()) if b.revision == revision]
    short = [b for b in index.short.get(step, ()) if b.revision == revision]
    if not short:
        if index.record.whole:
            yield note(f"revision {revision}: the record of what was given back is lost", where)
        return
    stays, returned = short[0].members, set(short[0].returned)
    if before and [m for m in before[0].members if m.group not in returned] != [*stays]:
        yield problem(f"revision {revision}: what stays is not what was not given back", where)
    if after and after[0].members[: len(stays)] != stays:
        yield problem(f"revision {revision}: it lacks what stayed of the former one", where)
    for group in sorted(returned - {f.group for f in index.record.fates}):
        yield problem(f"group {group} was given back and has no fate", where)
    yield note(f"revision {revision}: {len(returned)} groups given back so far", where)


def _members(index: RunIndex, batch: Batch) -> Iterator[Finding]:
    where = f"batch {batch.step}"
    if not batch.members:
        yield problem("has no members", where)
    for group, times in Counter(m.group for m in batch.members).items():
        if times > 1:
            yield problem(f"holds group {group} {times} times", where)
    for member in batch.members:
        yield from _whole(index, member, f"{where}, group {member.group}")


def _whole(index: RunIndex, member: Member, where: str) -> Iterator[Finding]:
    size = index.size(member.group)
    if not size:
        yield problem("its group was never opened", where)
        return
    if len(member.attempts) != size:
        yield problem(f"{len(member.attempts)} siblings of {size}", where)
    valid = 0
    for sibling, attempt in enumerate(member.attempts):
        newest = index.newest_finished(member.group, sibling)
        if newest != attempt:
            counts = "none has finished" if newest is None else f"{newest} is the newest finished"
            yield problem(f"sibling {sibling} counts attempt {attempt}, but {counts}", where)
        labelled = index.label(f"{member.group}.{sibling}.{attempt}")
        valid += labelled is not None and labelled.label.outcome.valid
    if not valid:
        yield problem("no sibling has a valid outcome", where)


def _fates(index: RunIndex) -> Iterator[Finding]:
    held, trained = index.in_batches(), index.in_batches(trained=True)
    for group, fates in index.fates.items():
        where = f"group {group}"
        if len(fates) > 1:
            yield problem(f"has {len(fates)} fates", where)
        if group not in index.opened:
            yield problem("has a fate, but was never opened", where)
        for fate in fates:
            yield from _fate(index, fate, held.get(group, []), trained.get(group, []))
    for group, steps in trained.items():
        fates = index.fates.get(group, [])
        fated = {f.step for f in fates if f.fate is Fate.TRAINED}
        fated |= {s for f in fates for s in steps if index.brought_back(f, s)}
        for step in set(steps) - fated:
            yield problem(f"trained in batch {step}, but has no such fate", f"group {group}")


def _fate(index: RunIndex, fate: FateOf, held: list[int], trained: list[int]) -> Iterator[Finding]:
    where = f"group {fate.group}"
    if fate.fate is Fate.TRAINED and fate.step not in trained:
        yield problem(f"its fate says trained in batch {fate.step}, which does not hold it", where)
    for step in held if fate.fate is Fate.FILTERED else ():
        if index.brought_back(fate, step):
            yield note(f"filtered while the record of batch {step}, which has it, was lost", where)
        else:
            yield problem(f"filtered, but stands in batch {step}", where)
    if fate.fate is Fate.FILTERED and not fate.reason:
        yield problem("filtered without a reason", where)
    yield from _evaluation(index, fate, held)


def _evaluation(index: RunIndex, fate: FateOf, held: list[int]) -> Iterator[Finding]:
    """What is evaluated is never trained on, and nothing else is told to be evaluated."""
    where, evaluates = f"group {fate.group}", index.evaluates(fate.group)
    if evaluates and (fate.fate is Fate.TRAINED or held):
        yield problem(f"of an evaluation, but {fate.fate} and in batches {held}", where)
    if fate.fate is not Fate.EVALUATED:
        return
    if not evaluates and fate.group in index.opened:
        yield problem("evaluated, but its job is for the trainer", where)
    found = index.evaluated.get(fate.group, [])
    if not found and index.record.whole:
        yield problem("evaluated, but what was found out is lost", where)
    if found and len(found[0].found.siblings) != index.size(fate.group):
        yield problem(f"evaluated with {len(found[0].found.siblings)} siblings", where)


def _versions(index: RunIndex) -> Iterator[Finding]:
    for version, records in index.versions.items():
        where = f"version {version}"
        if len({(r.parent, r.digest) for r in records}) > 1:
            yield problem("the number was used for different weights", where)
        # Of records that are no publication, the one with a checkpoint is of the durable stage.
        stages = {(r.published, not r.published and r.checkpoint != "") for r in records}
        if len(stages) < len(records):
            yield problem("a stage is recorded twice", where)
        if version != ROOT_VERSION and records[0].published:
            yield problem("published before it was durable", where)
        parent = records[0].parent
        if version != ROOT_VERSION and not (parent in index.versions or parent == ROOT_VERSION):
            yield problem(f"its parent {parent} is not recorded", where)
        if version > ROOT_VERSION and parent >= version:
            yield problem(f"its parent {parent} is not older", where)


def _ancestry(index: RunIndex, batch: Batch) -> Iterator[Finding]:
    """Every token trained on belongs to one version that the step's own version descends from."""
    lineage = index.lineage(batch)
    for episode in index.member_ids(batch.members):
        if not any(label.label.outcome.valid for label in index.labels.get(episode, ())):
            continue
        for turn in index.turns.get(episode, []):
            where = f"episode {episode}, turn {turn.turn}"
            strangers = {s.version for s in turn.spans} - lineage
            if strangers:
                yield problem(
                    f"sampled from version {min(strangers)}, of which batch {batch.step}"
                    " is no descendant",
                    where,
                )
            if sum(s.end - s.start for s in turn.spans) != turn.sampled_tokens:
                yield problem("has tokens without one version each", where)
