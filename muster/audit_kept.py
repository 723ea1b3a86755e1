"""Audit rules for what the server keeps: nothing lost, nothing left over, totals that add up.

Owns: streams against the server's own counts, dead letters, payload keys, totals of retired groups.
Promise: one function per rule, each yields a finding per breach. Pure.
Does not cover: what the entries say of each other (the other audit modules).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from muster.entries import RunRecord, StreamState
from muster.finding import Finding, note, problem
from muster.run_index import RunIndex
from muster.types import Fate, job_and_index

_SHOWN = 3


def check(index: RunIndex) -> Iterator[Finding]:
    """Every rule on streams, keys and totals."""
    record = index.record
    yield from _streams(record)
    yield from _dead(record)
    yield from _fenced(record)
    yield from _payloads(index)
    if record.whole:
        yield from _totals(index)


def _streams(record: RunRecord) -> Iterator[Finding]:
    for damaged in record.damaged:
        yield problem(
            f"entry cannot be read: {damaged.problem}", f"stream {damaged.stream} {damaged.at}"
        )
    any_on_disk = any(state.on_disk for state in record.streams)
    for state in record.streams:
        yield from _stream(state, any_on_disk)
    retired = sum(map(len, record.kept.retired_after.values()))
    if not record.whole:
        yield note(
            f"{retired} retired groups are not examined: their entries were trimmed, and lie on the"
            " disk of the machine that runs the bank (state_dir/history); run the audit there",
            f"run {record.run}",
        )


def _stream(state: StreamState, any_on_disk: bool) -> Iterator[Finding]:
    where = f"stream {state.stream}"
    if state.max_deleted != "0-0":
        yield problem(f"an entry was deleted (newest: {state.max_deleted})", where)
    elif state.missing and any_on_disk:
        yield problem(
            f"{state.missing} entries were trimmed and are not in the history on disk", where
        )
    elif state.missing:
        yield note(f"the oldest {state.missing} entries were trimmed", where)


def _dead(record: RunRecord) -> Iterator[Finding]:
    for dead in record.dead:
        yield problem(f"set aside as unreadable: {dead.why}", f"stream {dead.stream} {dead.of}")


def _fenced(record: RunRecord) -> Iterator[Finding]:
    for role, refused in record.kept.fenced.items():
        if refused:
            yield note(f"{refused} writes of a former owner were refused", f"role {role}")


def _payloads(index: RunIndex) -> Iterator[Finding]:
    """Tokens of groups that may still be trained on are there; those of retired ones are gone."""
    kept = index.record.kept
    if kept.payloads is None:
        return
    have: dict[str, set[str]] = defaultdict(set)
    for name in kept.payloads:
        have[_group_of(name)].add(name)
    for group in index.opened:
        if not _is_in(group, kept.retired_after):
            lost = sorted(_named(index, group) - have.get(group, set()))
            if lost:
                yield problem(f"payloads are lost: {_some(lost)}", f"group {group}")
    for group, names in have.items():
        if _is_in(group, kept.retired):
            yield problem(f"retired, but it still holds {_some(sorted(names))}", f"group {group}")


def _named(index: RunIndex, group: str) -> set[str]:
    """Payload keys that the group's turns name, without the run's prefix."""
    prefix = f"m:{{{index.record.run}}}:"
    return {
        key.removeprefix(prefix)
        for attempts in index.by_group.get(group, {}).values()
        for events in attempts.values()
        for event in events
        for key in (getattr(event, "payload_key", ""), getattr(event, "output_key", ""))
        if key
    }


def _group_of(name: str) -> str:
    """Of "p:GROUP.SIBLING.ATTEMPT.TURN"."""
    return name.partition(":")[2].rsplit(".", 3)[0]


def _is_in(group: str, retired: Mapping[str, frozenset[int]]) -> bool:
    found = job_and_index(group)
    return found is not None and found[1] in retired.get(found[0], ())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _totals(index: RunIndex) -> Iterator[Finding]:
    """What the bank counted of retired groups is what their entries add up to."""
    kept = index.record.kept
    for job, told in kept.totals.items():
        retired = kept.retired.get(job, frozenset())
        groups = [g for g in index.opened if _is_in(g, {job: retired})]
        if len(groups) < len(retired):
            absent = len(retired) - len(groups)
            yield problem(f"of {absent} retired groups there is no record", f"job {job}")
            continue
        found = count(index, groups)
        for name in sorted(n for n in {*found, *told} if n in COUNTED or n.startswith(_OUTCOME)):
            counted, entries = told.get(name, 0), found.get(name, 0)
            if counted == entries:
                continue
            says = f"its total says {counted} {name}, its entries add up to {entries}"
            # What was under way when it was cancelled may end after the bank has counted.
            given_up = counted < entries and index.cancelled(job)
            yield (note if given_up else problem)(says, f"job {job}")
        fewest, most = repairs(index, groups)
        if not fewest <= told.get("repairs", 0) <= most:
            says = f"its total says {told.get('repairs', 0)} repairs"
            yield problem(f"{says}, its entries {fewest} to {most}", f"job {job}")


COUNTED = (*Fate, "episodes", "turns")
_OUTCOME = "outcome:"


def count(index: RunIndex, groups: Iterable[str]) -> dict[str, int]:
    """Totals of groups, named as the bank names them."""
    found: Counter[str] = Counter()
    for group in groups:
        fate = index.fate(group)
        if fate is not None:
            found[str(fate.fate)] += 1
        for sibling, attempts in index.by_group.get(group, {}).items():
            for attempt in attempts:
                id_ = f"{group}.{sibling}.{attempt}"
                found["episodes"] += id_ in index.finished
                found["turns"] += len({t.turn for t in index.turns.get(id_, ())})
                if labelled := index.label(id_):
                    found[f"{_OUTCOME}{labelled.label.outcome}"] += 1
    return dict(found)


def repairs(index: RunIndex, groups: Iterable[str]) -> tuple[int, int]:
    """New attempts and rebuilt boxes of groups, at least and at most: a repair that was still to
    come when its group ended is counted, and has no entry."""
    fewest = most = 0
    for group in groups:
        for sibling, attempts in index.by_group.get(group, {}).items():
            fewest += max(attempts, default=0)
            for attempt in attempts:
                if labelled := index.label(f"{group}.{sibling}.{attempt}"):
                    most += not labelled.label.outcome.valid
                    fewest += labelled.label.replays
                    most += labelled.label.replays
    return fewest, most
