"""What a run, batch, group or episode waits for, as far as its record alone tells.

Owns: the answers that need no service, what becomes of a step that is running. Promise: pure; each
line says what waits, for what, since when, who has to move, and what to run next.
Does not cover: what the services know beyond the record, and what is shown (explained.py).
"""

from __future__ import annotations

from datetime import UTC, datetime

from muster.entries import Intended
from muster.run_index import RunIndex, order
from muster.subject import Kind, Subject
from muster.types import Waiting

_GROUPS_MAX = 8


def of_record(asked: Subject, index: RunIndex) -> list[Waiting]:
    """The answer without any service."""
    if asked.kind is Kind.EPISODE:
        return [_episode(asked.id, index)]
    if asked.kind is Kind.GROUP:
        return _group(asked.id, index)
    steps = {*index.frozen, *index.trained}
    step = int(asked.id) if asked.kind is Kind.BATCH else max(steps, default=0) + 1
    if step in steps:
        return [_frozen(step, index)]
    return _next_batch(step, index)


def _frozen(step: int, index: RunIndex) -> Waiting:
    batch = index.batch(step)
    groups = f"{len(batch.members)} groups"
    if not batch.trained:
        told = "the trainer's step and its checkpoint"
        return Waiting(
            f"batch {step}",
            f"leased, {groups}",
            told,
            batch.complete_unix_s,
            "trainer",
            "muster report",
        )
    made = index.made_by(step)
    version = f", made version {made[-1].version}" if made else ""
    return Waiting(
        f"batch {step}",
        f"trained on {groups}{version}",
        next_command=f"muster report --batch {step}",
    )


def _next_batch(step: int, index: RunIndex) -> list[Waiting]:
    held = index.in_batches()
    open_ = [g for g in index.opened if g not in index.fates and g not in held]
    complete = [g for g in open_ if not _unfinished(index, g)]
    waiting = [g for g in open_ if g not in complete]
    cancelled = {job for job, records in index.jobs.items() if any(r.cancelled for r in records)}
    waiting = [g for g in waiting if index.opened[g][0].job not in cancelled]
    lines = [_group(g, index)[0] for g in waiting]
    lines.sort(key=lambda line: line.since_unix_s)
    told = f"groups: {len(complete)} complete, {len(waiting)} open"
    if not index.jobs:
        return [
            Waiting(
                f"batch {step}",
                "no job was submitted",
                owner="client",
                next_command="muster submit tasks/",
            )
        ]
    if not waiting:
        state = "a trainer" if complete else "more groups: no group is open"
        return [
            Waiting(
                f"batch {step}",
                told,
                state,
                0.0,
                "trainer" if complete else "client",
                "muster report",
            )
        ]
    head = Waiting(f"batch {step}", "collecting", told, 0.0, "router", lines[0].next_command)
    return [head, *lines[:_GROUPS_MAX]]


def _unfinished(index: RunIndex, group: str) -> list[int]:
    """Siblings that have no valid outcome yet."""
    found = []
    for sibling in range(index.size(group)):
        labelled = index.outcome(group, sibling)
        if labelled is None or not labelled.label.outcome.valid:
            found.append(sibling)
    return found


def _group(group: str, index: RunIndex) -> list[Waiting]:
    fate = index.fate(group)
    if fate is not None:
        told = f"trained in batch {fate.step}" if fate.step else f"filtered: {fate.reason}"
        return [Waiting(group, told, next_command="muster audit")]
    for step in index.in_batches().get(group, ())[-1:]:
        told = "the trainer's step and its checkpoint"
        return [Waiting(group, f"in batch {step}", told, 0.0, "trainer", "muster explain batch")]
    late = _unfinished(index, group)
    state = f"{index.size(group) - len(late)} of {index.size(group)} siblings ended"
    if not late:
        return [Waiting(group, state, "a batch", 0.0, "trainer", "muster explain batch")]
    lines = [_episode(_newest(index, group, sibling), index) for sibling in late]
    lines.sort(key=lambda line: line.since_unix_s)
    first = lines[0]
    after = f"muster explain {first.subject}"
    told = f"{first.subject}: {first.state}"
    return [Waiting(group, state, told, first.since_unix_s, first.owner, after), *lines]


def _newest(index: RunIndex, group: str, sibling: int) -> str:
    """The attempt that is under way, or the one that would be next."""
    attempt = max(index.attempts.get((group, sibling), {0: []}))
    labels = index.labels.get(f"{group}.{sibling}.{attempt}", ())
    after = 1 if labels and not labels[-1].label.outcome.valid else 0
    return f"{group}.{sibling}.{attempt + after}"


def _episode(episode: str, index: RunIndex) -> Waiting:
    group, sibling, attempt = episode.rsplit(".", 2)
    labels = index.labels.get(episode, ())
    if labels:
        label = labels[-1].label
        detail = f": {label.detail}" if label.detail else ""
        state = f"ended: {label.outcome} ({label.cause}){detail}"
        return Waiting(episode, state, next_command=f"muster explain {group}")
    events = index.attempts.get((group, int(sibling)), {}).get(int(attempt), [])
    step = running_step(episode, index)
    if step is not None:
        state = f"step of turn {step.turn} runs: {step.command}"
        told = f"the end of the command, or its limit of {step.timeout_s:g} s"
        owner = step.host or "sandbox"
        return Waiting(episode, state, told, _at(step.at), owner, "tail -n 20 logs/sandbox.log")
    opened = index.opened[group][0].opened_unix_s if group in index.opened else 0.0
    if not events:
        told = "a box, a replica, or a place among the running episodes"
        since = opened if int(attempt) == 0 else 0.0
        return Waiting(
            episode, "nothing recorded yet", told, since, "router", "tail -n 20 logs/router.log"
        )
    turns = len(index.turns.get(episode, ()))
    told = f"the reply of turn {turns}, or the verdict"
    since = max(_at(event.at) for event in events)
    return Waiting(
        episode, f"{turns} turns recorded", told, since, "router", "tail -n 20 logs/router.log"
    )


def running_step(episode: str, index: RunIndex) -> Intended | None:
    """The step that was intended last and has no result, while the episode has not ended."""
    intents = index.intended.get(episode, ())
    if not intents or episode in index.finished:
        return None
    done = {turn.turn for turn in index.turns.get(episode, ())}
    newest = max(intents, key=lambda intent: order(intent.at))
    return None if newest.turn in done else newest


def consequence(episode: str, index: RunIndex) -> str:
    """What becomes of the step that is running; empty when none is."""
    step = running_step(episode, index)
    if step is None:
        return ""
    since, limit = _at(step.at), f"{step.timeout_s:g} s"
    return (
        f"running since {clock(since)}; its limit of {limit} ends it at "
        f"{clock(since + step.timeout_s)}: "
        "the model is told so and goes on, or its box is verified as it is. That counts as the "
        "model's doing, unless the host was starved"
    )


def clock(unix_s: float) -> str:
    """Time of day here."""
    return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime("%H:%M:%S")


def _at(stream_id: str) -> float:
    """When the server wrote an entry, Unix seconds."""
    return order(stream_id)[0] / 1000
