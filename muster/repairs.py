"""What was repaired, why, and what a person should look at.

Owns: counts of replaced attempts and rebuilt boxes by cause, flaky verifiers by task, remarks.
Promise: pure; each remark names the group, task or setting that it is about.
Does not cover: whether the record adds up (audit.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from muster.entries import Member
from muster.run_index import RunIndex
from muster.types import OutcomeLabel, Value

REMARKS_MAX = 50


class Repairs(Value, frozen=True):
    """Counts; `attempts` were replaced by a later one, `replays` are boxes rebuilt."""

    attempts: int
    attempts_by_cause: dict[str, int]
    replays: int
    replays_by_reason: dict[str, int]
    turns_replayed: int
    steps_resumed: int  # results that a box had kept for a later router


def repairs(index: RunIndex, places: Iterable[tuple[str, int, int]] | None = None) -> Repairs:
    """Of the run, or of places: group, sibling, newest attempt that counts."""
    if places is None:
        places = [(g, n, max(attempts)) for (g, n), attempts in index.attempts.items()]
    causes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    replaced = replayed = resumed = 0
    for group, sibling, newest in places:
        replaced += newest
        for attempt in range(newest + 1):
            episode = f"{group}.{sibling}.{attempt}"
            labelled = index.label(episode)
            if attempt < newest:
                causes[labelled.label.cause if labelled else "not recorded"] += 1
            reasons.update(r.reason or "not recorded" for r in index.restored.get(episode, ()))
            replayed += sum(r.turns_replayed for r in index.restored.get(episode, ()))
            resumed += sum(t.resumed for t in index.turns.get(episode, ()))
    total = sum(reasons.values())
    counted = dict(causes.most_common()), dict(reasons.most_common())
    return Repairs(replaced, counted[0], total, counted[1], replayed, resumed)


def of_members(index: RunIndex, members: Iterable[Member]) -> Repairs:
    """Of the siblings of a batch, up to the attempts that count."""
    return repairs(index, [(m.group, n, a) for m in members for n, a in enumerate(m.attempts)])


def flaky_by_task(index: RunIndex) -> dict[str, int]:
    """Task → verdicts that differed between two runs of its verifier; those without any absent."""
    found: Counter[str] = Counter()
    for labels in index.labels.values():
        found[_task(index, labels[0].key.group)] += labels[0].label.flaky
    return {task: count for task, count in found.most_common() if count}


def remarks(index: RunIndex) -> list[str]:
    """For people, most serious first; what is left out is said."""
    found = [
        *_invalid_verifiers(index),
        *_flaky(index),
        *_starved(index),
        *_zero_variance(index),
    ]
    more = len(found) - REMARKS_MAX
    return found if more <= 0 else [*found[:REMARKS_MAX], f"and {more} more remarks"]


def _task(index: RunIndex, group: str) -> str:
    return index.opened[group][0].task if group in index.opened else "unknown task"


def _newest(index: RunIndex, group: str) -> list[OutcomeLabel]:
    found = [index.outcome(group, n) for n in range(index.size(group))]
    return [labelled.label for labelled in found if labelled]


def _invalid_verifiers(index: RunIndex) -> Iterator[str]:
    """One sibling may break its files; all of them at once is the task's fault."""
    for group in index.opened:
        labels = _newest(index, group)
        causes = {label.cause for label in labels if label.cause.startswith("verifier_")}
        if labels and all(label.cause.startswith("verifier_") for label in labels):
            task = _task(index, group)
            yield (
                f"task {task}: no sibling of group {group} got a verdict ({_listed(causes)}): "
                f"its tests are likely broken; `muster tasks check` tries them"
            )


def _flaky(index: RunIndex) -> Iterator[str]:
    for task, count in flaky_by_task(index).items():
        yield f"task {task}: its verifier gave two different verdicts {count} times"


def _starved(index: RunIndex) -> Iterator[str]:
    starved = sum(
        labels[0].label.cause == "host_starved" for labels in index.labels.values() if labels
    )
    if starved:
        yield (
            f"{starved} attempts ended because their host was starved of processor time: "
            "fewer boxes at once (sandbox.boxes_max), or another sandbox host"
        )


def _zero_variance(index: RunIndex) -> Iterator[str]:
    """Groups that teach nothing, by task; trained or filtered by the job's policy."""
    found: dict[str, list[str]] = defaultdict(list)
    for group in index.opened:
        if equal_rewards(_newest(index, group), index.size(group)):
            found[_task(index, group)].append(group)
    for task, groups in sorted(found.items(), key=lambda item: -len(item[1])):
        same = {_reward(label) for group in groups for label in _newest(index, group)}
        rewards = _listed(f"{r:g}" for r in sorted(r for r in same if r is not None))
        yield (
            f"task {task}: {len(groups)} groups without variance (rewards {rewards}): they carry "
            f"no gradient ({_listed(groups[:3])}{', …' if len(groups) > 3 else ''})"
        )


def equal_rewards(labels: Iterable[OutcomeLabel], size: int) -> bool:
    """True for a whole group whose valid rewards are all equal."""
    rewards = [r for label in labels if (r := _reward(label)) is not None]
    ended = len(list(labels)) == size
    return ended and len(rewards) > 1 and len(set(rewards)) == 1


def _reward(label: OutcomeLabel) -> float | None:
    return label.reward if label.outcome.valid else None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
