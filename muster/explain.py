"""What a run, job, batch, group or episode waits for, as far as its record alone tells.

Owns: the answers that need no service, what becomes of a step that is running. Promise: pure; each
line says what waits, for what, since when, who has to move, and what to run next.
Does not cover: what the services know beyond the record, and what is shown (explained.py).
"""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf

from muster.entries import FateOf, Intended
from muster.run_index import RunIndex
from muster.stream_ids import id_order, id_unix_s
from muster.subject import Kind, Subject
from muster.types import Waiting

_GROUPS_MAX = 8
_NAMED_MAX = 3


def of_record(asked: Subject, index: RunIndex) -> list[Waiting]:
    """The answer without any service."""
    if asked.kind is Kind.EPISODE:
        return [_episode(asked.id, index)]
    if asked.kind is Kind.GROUP:
        return _group(asked.id, index)
    if asked.kind is Kind.JOB:
        return _job(asked.id, index)
    steps = index.steps
    step = int(asked.id) if asked.kind is Kind.BATCH else max(steps, default=0) + 1
    if step in steps:
        return [_frozen(step, index)]
    return _next_batch(step, index)


def _job(job: str, index: RunIndex) -> list[Waiting]:
    groups = [g for g, opened in index.opened.items() if opened[0].job == job]
    open_ = [g for g in groups if index.fate(g) is None]
    state = f"{len(groups)} groups on record, {len(groups) - len(open_)} of them with a fate"
    if index.cancelled(job):
        return [Waiting(job, f"cancelled: {state}", next_command="muster report")]
    if not open_:
        return [Waiting(job, state, next_command=f"muster watch {job}")]
    lines = [_group(g, index)[0] for g in open_]
    lines.sort(key=lambda line: line.since_unix_s or inf)  # complete groups last
    first = lines[0]
    head = Waiting(job, state, f"{len(open_)} groups", 0.0, first.owner, first.next_command)
    return [head, *lines[:_GROUPS_MAX]]


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
    complete, waiting = _collected(index)
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
        return [Waiting(f"batch {step}", told, *_none_open(index, len(complete)))]
    first = lines[0]
    name = f"batch {step}"
    head = Waiting(name, "collecting", told, 0.0, first.owner, first.next_command)
    return [head, *lines[:_GROUPS_MAX]]


def _collected(index: RunIndex) -> tuple[list[str], list[str]]:
    """Groups that the next batch may be made of: complete ones, and those that are not yet."""
    held = index.in_batches()
    open_ = [g for g in index.opened if g not in index.fates and g not in held]
    complete = [g for g in open_ if not _unfinished(index, g)]
    waiting = [g for g in open_ if g not in complete]
    return complete, [g for g in waiting if not index.cancelled(index.opened[g][0].job)]


def _none_open(index: RunIndex, complete: int) -> tuple[str, float, str, str]:
    """What a batch waits for when every open group is complete, and whose move that is. How many
    groups it takes is known from the one before."""
    steps = index.steps
    takes = len(index.batch(max(steps)).members) if steps else 0
    if complete and complete >= takes > 0:
        return "the trainer to ask for it", 0.0, "trainer", "muster report"
    if complete and not takes:
        waits = "the trainer to ask for it, or more groups than are open: it alone knows"
        return waits, 0.0, "trainer, or client", "muster report"
    lacks = f": {complete} of {takes} are complete, and no other is open" if takes else ""
    return f"more groups{lacks or ': no group is open'}", 0.0, "client", "muster submit tasks/"


def _unfinished(index: RunIndex, group: str) -> list[int]:
    """Siblings that have no valid outcome yet."""
    found = []
    for sibling in range(index.size(group)):
        labelled = index.outcome(group, sibling)
        if labelled is None or not labelled.label.outcome.valid:
            found.append(sibling)
    return found


def _why(fate: FateOf) -> str:
    """Its reason, with the figures that it was decided on (KL per token)."""
    figures = (
        ("at most", fate.predicted_kl),
        ("scored", fate.scored_kl),
        ("measured by the trainer", fate.measured_kl),
    )
    told = ", ".join(f"{name} {kl:.3g}" for name, kl in figures if kl is not None)
    return f"{fate.reason} ({told} nats per token)" if told else fate.reason


def _group(group: str, index: RunIndex) -> list[Waiting]:
    fate = index.fate(group)
    if fate is not None:
        told = f"trained in batch {fate.step}" if fate.step else f"filtered: {_why(fate)}"
        return [Waiting(group, told, next_command="muster audit")]
    for step in index.in_batches().get(group, ())[-1:]:
        told = "the trainer's step and its checkpoint"
        return [Waiting(group, f"in batch {step}", told, 0.0, "trainer", "muster explain batch")]
    late = _unfinished(index, group)
    state = f"{index.size(group) - len(late)} of {index.size(group)} siblings ended"
    if not late:
        return [_complete(group, state, index)]
    lines = [_episode(_newest(index, group, sibling), index) for sibling in late]
    lines.sort(key=lambda line: line.since_unix_s)
    first = lines[0]
    after = f"muster explain {first.subject}"
    told = f"{first.subject}: {first.state}"
    return [Waiting(group, state, told, first.since_unix_s, first.owner, after), *lines]


def _complete(group: str, state: str, index: RunIndex) -> Waiting:
    complete, others = _collected(index)
    if not others:
        told, since, owner, after = _none_open(index, len(complete))
        return Waiting(group, state, f"a batch, which waits for {told}", since, owner, after)
    others.sort(key=lambda other: id_order(index.opened[other][0].at))
    told = f"a batch, which waits for groups that are open: {', '.join(others[:_NAMED_MAX])}"
    if len(others) > _NAMED_MAX:
        told += f" and {len(others) - _NAMED_MAX} more"
    return Waiting(group, state, told, 0.0, "router", f"muster explain {others[0]}")


def _newest(index: RunIndex, group: str, sibling: int) -> str:
    """The attempt that is under way, or the one that would be next."""
    attempt = max(index.attempts.get((group, sibling), {0: []}))
    labelled = index.label(f"{group}.{sibling}.{attempt}")
    after = 1 if labelled and not labelled.label.outcome.valid else 0
    return f"{group}.{sibling}.{attempt + after}"


def _episode(episode: str, index: RunIndex) -> Waiting:
    group, sibling, attempt = episode.rsplit(".", 2)
    labelled = index.label(episode)
    if labelled:
        label = labelled.label
        detail = f": {label.detail}" if label.detail else ""
        state = f"ended: {label.outcome} ({label.cause}){detail}"
        return Waiting(episode, state, next_command=f"muster explain {group}")
    events = index.attempts.get((group, int(sibling)), {}).get(int(attempt), [])
    step = running_step(episode, index)
    if step is not None:
        state = f"step of turn {step.turn} runs: {step.command}"
        told = f"the end of the command, or its limit of {step.timeout_s:g} s, which ends it"
        owner = f"sandbox host {step.host}" if step.host else "sandbox"
        job = index.opened[group][0].job if group in index.opened else ""
        after = f"muster watch {job}" if job else "muster report"
        return Waiting(episode, state, told, id_unix_s(step.at), owner, after)
    opened = index.opened[group][0].opened_unix_s if group in index.opened else 0.0
    if not events:
        told = "a box, a replica, or a place among the running episodes"
        since = opened if int(attempt) == 0 else 0.0
        return Waiting(
            episode, "nothing recorded yet", told, since, "router", "tail -n 20 logs/router.log"
        )
    turns = len(index.turns.get(episode, ()))
    told = f"the reply of turn {turns}, or the verdict"
    since = max(id_unix_s(event.at) for event in events)
    return Waiting(
        episode, f"{turns} turns recorded", told, since, "router", "tail -n 20 logs/router.log"
    )


def running_step(episode: str, index: RunIndex) -> Intended | None:
    """The step that was intended last and has no result, while the episode has not ended."""
    intents = index.intended.get(episode, ())
    if not intents or episode in index.finished:
        return None
    done = {turn.turn for turn in index.turns.get(episode, ())}
    newest = max(intents, key=lambda intent: id_order(intent.at))
    return None if newest.turn in done else newest


def consequence(episode: str, index: RunIndex) -> str:
    """What becomes of the step that is running; empty when none is."""
    step = running_step(episode, index)
    if step is None:
        return ""
    since, limit = id_unix_s(step.at), f"{step.timeout_s:g} s"
    return (
        f"running since {clock(since)}; its limit of {limit} ends it at "
        f"{clock(since + step.timeout_s)}: "
        "the model is told so and goes on, or its box is verified as it is. That counts as the "
        "model's doing, unless the host was starved"
    )


def clock(unix_s: float) -> str:
    """Time of day here."""
    return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime("%H:%M:%S")
