"""Audit rules within a sibling: attempts are linked, steps ran once, boxes change by replay alone.

Owns: what must hold between the attempts of a sibling, and between intent, step and box of one
attempt. Promise: one function per rule, each yields a finding per breach. Pure.
Does not cover: whether turns are complete (audit_episodes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from muster.entries import Finish, Intended, Opened, Restored, Turn
from muster.finding import Finding, problem
from muster.run_index import Event, RunIndex
from muster.stream_ids import id_order


def check(index: RunIndex) -> Iterator[Finding]:
    """Every rule on every chain of attempts."""
    for (group, sibling), attempts in index.attempts.items():
        yield from _links(index, group, sibling, attempts)
        for attempt, events in attempts.items():
            where = f"episode {group}.{sibling}.{attempt}"
            yield from _intents(index, f"{group}.{sibling}.{attempt}", where)
            yield from _boxes(events, where)
            yield from _replays(index, f"{group}.{sibling}.{attempt}", where)
    yield from _epochs(index)


def _links(
    index: RunIndex, group: str, sibling: int, attempts: Mapping[int, Sequence[Event]]
) -> Iterator[Finding]:
    """An attempt follows only a former one that ended without a valid outcome."""
    known = sorted(attempts)
    for attempt in known:
        if attempt == 0:
            continue
        where = f"episode {group}.{sibling}.{attempt}"
        former = attempt - 1
        labels = index.labels.get(f"{group}.{sibling}.{former}", [])
        if former not in attempts and not labels:
            yield problem(f"there is no attempt {former} before it", where)
        elif any(label.label.outcome.valid for label in labels):
            yield problem(f"repeats attempt {former}, which had a valid outcome", where)
        elif not _ended_before(attempts.get(former, ()), attempts[attempt][0]):
            yield problem(f"begun while attempt {former} had not ended", where)
    yield from _bounded(index, group, sibling, known)


def _ended_before(events: Sequence[Event], then: Event) -> bool:
    return any(isinstance(e, Finish) and id_order(e.at) < id_order(then.at) for e in events)


def _bounded(index: RunIndex, group: str, sibling: int, known: Sequence[int]) -> Iterator[Finding]:
    bound = index.opened[group][0].policy.repairs_max if group in index.opened else None
    if bound is not None and known[-1] > bound:
        where = f"sibling {group}.{sibling}"
        yield problem(f"was repaired {known[-1]} times, its job allows {bound}", where)


def _intents(index: RunIndex, episode: str, where: str) -> Iterator[Finding]:
    """Each intended step has its result or the end of its attempt; each step had an intent."""
    intended = {i.turn: i for i in reversed(index.intended.get(episode, ()))}
    turns = {t.turn: t for t in reversed(index.turns.get(episode, ()))}
    ends = index.finished.get(episode, ())
    for turn, times in Counter(i.turn for i in index.intended.get(episode, ())).items():
        if times > 1:
            yield problem(f"the step of turn {turn} was intended {times} times", where)
    newest = max(intended, default=-1)
    for turn, intent in intended.items():
        done = turns.get(turn)
        if done is None and turn < newest:
            yield problem(f"the step of turn {turn} has no result, yet later ones were run", where)
        if done is not None:
            yield from _same(intent, done, where)
        if ends and id_order(intent.at) > id_order(ends[0].at):
            yield problem(f"the step of turn {turn} was intended after the end", where)
    for turn, done in turns.items():
        if done.command and done.box and turn not in intended:  # older records name no box
            yield problem(f"the step of turn {turn} ran without a recorded intent", where)


def _same(intent: Intended, done: Turn, where: str) -> Iterator[Finding]:
    if id_order(done.at) < id_order(intent.at):
        yield problem(f"the step of turn {done.turn} was intended after it had ended", where)
    what = [
        name
        for name in ("payload_key", "command", "prompt_tokens", "sampled_tokens", "spans")
        if getattr(intent, name) != getattr(done, name)
    ]
    if what:
        yield problem(f"turn {done.turn} ended with another {what[0]} than intended", where)


def _boxes(events: Sequence[Event], where: str) -> Iterator[Finding]:
    """Within an attempt the box changes only where a replay is recorded."""
    box: tuple[str, str] | None = None
    for event in events:
        if isinstance(event, Restored):
            box = event.host, event.box
        elif isinstance(event, Intended | Turn) and event.box:
            here = event.host, event.box
            if box is not None and here != box:
                moved = f"box {event.box} of {event.host}, the episode was in {box[1]} of {box[0]}"
                yield problem(f"turn {event.turn} was in {moved}, without a replay", where)
            box = here


def _replays(index: RunIndex, episode: str, where: str) -> Iterator[Finding]:
    """Replays are counted in order, and the label counts them too."""
    replays = index.restored.get(episode, [])
    numbers = [r.repair for r in replays]
    if sorted(set(numbers)) != numbers:
        yield problem(f"its replays are numbered {', '.join(map(str, numbers))}", where)
    ends = index.finished.get(episode, ())
    if ends and any(id_order(r.at) > id_order(ends[0].at) for r in replays):
        yield problem("a box was restored after the end", where)
    for replay in replays:
        done = [t for t in index.turns.get(episode, ()) if id_order(t.at) < id_order(replay.at)]
        steps = sum(bool(t.command) for t in done)
        if replay.turns_replayed not in (steps, len(done)):
            counted = f"{replay.turns_replayed} turns replayed of {len(done)}"
            yield problem(f"replay {replay.repair}: {counted}", where)
    labelled = index.label(episode)
    if labelled and labelled.label.replays < len(replays):
        counted = f"its label counts {labelled.label.replays}"
        yield problem(f"{len(replays)} replays are recorded, {counted}", where)


def _epochs(index: RunIndex) -> Iterator[Finding]:
    """Within a group no event of an older owner follows one of a newer."""
    record = index.record
    events: list[Opened | Event] = list(record.opened)
    events += record.intended
    events += record.turns
    events += record.restored
    events += record.finished
    newest: dict[str, int] = {}
    for event in sorted(events, key=lambda e: id_order(e.at)):
        group, epoch = event.key.group, event.key.owner_epoch
        if epoch < newest.get(group, epoch):
            yield problem(
                f"written by owner epoch {epoch} after {newest[group]} had taken over",
                f"stream events {event.at}",
            )
        newest[group] = max(epoch, newest.get(group, epoch))
