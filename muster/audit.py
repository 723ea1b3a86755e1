"""Does the run's record add up? Computed from the raw streams alone.

Owns: findings and totals. Promise: a trajectory lost or doubled, a group with two fates or in two
batches, a batch that is not whole and a version without ancestry each yield a problem; a group
without a fate is a note that says why it is open. Pure.
Does not cover: the rules themselves (audit_episodes.py, audit_batches.py), token payloads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from muster import audit_attempts, audit_batches, audit_episodes, audit_kept
from muster.bias import Bias, bias
from muster.entries import RunRecord
from muster.finding import Finding, Severity, note, problem
from muster.run_index import RunIndex
from muster.types import Fate, Value


class Totals(Value, frozen=True):
    """Counts of the run; siblings are places in groups, attempts are tries at filling them."""

    groups: int
    groups_trained: int
    groups_filtered: int
    groups_evaluated: int
    groups_open: int
    groups_retired: int  # beside the others: known by their totals alone
    siblings_dispatched: int
    siblings_trained: int  # by the members of trained batches
    siblings_filtered: int
    siblings_evaluated: int
    siblings_open: int
    attempts: int
    attempts_finished: int
    attempts_running: int  # the newest of their siblings, in groups that are still collected
    attempts_abandoned: int  # begun, never ended, and nothing will end them
    siblings_repaired: int
    batches_frozen: int
    batches_trained: int
    outcomes: dict[str, int]  # of finished attempts


class Audit(Value, frozen=True):
    """The result; `ok` without any problem."""

    run: str
    findings: tuple[Finding, ...]
    totals: Totals
    bias: Bias

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity is Severity.PROBLEM)

    @property
    def ok(self) -> bool:
        return not self.problems


def audit(record: RunRecord) -> Audit:
    """Check everything; problems first."""
    index = RunIndex(record)
    totals = count(index)
    found = [
        *audit_kept.check(index),
        *audit_episodes.check(index),
        *audit_attempts.check(index),
        *audit_batches.check(index),
        *_sum(totals),
        *_open_groups(index),
    ]
    found.sort(key=lambda f: f.severity is not Severity.PROBLEM)
    return Audit(record.run, tuple(found), totals, bias(index))


def count(index: RunIndex) -> Totals:
    """Totals, each from the records that own it, so that they can disagree."""
    sizes = {group: index.size(group) for group in index.opened}
    fated = {fate: index.fated(fate) for fate in Fate}
    unfated = [g for g in sizes if g not in index.fates]
    known = {(p, a) for p, attempts in index.attempts.items() for a in attempts}
    members = [m for step in index.trained for m in index.batch(step).members]
    trained = index.in_batches(trained=True)
    running = _running(index)
    labels = [labelled for episode in index.labels if (labelled := index.label(episode))]
    return Totals(
        groups=len(sizes),
        groups_trained=len(fated[Fate.TRAINED]),
        groups_filtered=len(fated[Fate.FILTERED]),
        groups_evaluated=len(fated[Fate.EVALUATED]),
        groups_open=len(unfated),
        groups_retired=0
        if index.record.whole
        else sum(map(len, index.record.kept.retired_after.values())),
        siblings_dispatched=sum(sizes.values()),
        siblings_trained=sum(len(m.attempts) for m in members),
        siblings_filtered=sum(
            sizes.get(g, 0)
            for g in fated[Fate.FILTERED]
            if not any(index.brought_back(index.fates[g][0], s) for s in trained.get(g, ()))
        ),
        siblings_evaluated=sum(sizes.get(g, 0) for g in fated[Fate.EVALUATED]),
        siblings_open=sum(sizes[g] for g in unfated),
        attempts=len(known),
        attempts_finished=len(index.finished),
        attempts_running=running,
        attempts_abandoned=len(known) - len(index.finished) - running,
        siblings_repaired=sum(max(attempts) > 0 for attempts in index.attempts.values()),
        batches_frozen=len(index.frozen),
        batches_trained=len(index.trained),
        outcomes=dict(sorted(Counter(str(x.label.outcome) for x in labels).items())),
    )


def _running(index: RunIndex) -> int:
    """Attempts that a router may still end: whether one is up, the record does not say."""
    return sum(
        f"{group}.{sibling}.{max(attempts)}" not in index.finished
        for (group, sibling), attempts in index.attempts.items()
        if group in index.opened
        and group not in index.fates
        and not index.cancelled(index.opened[group][0].job)
    )


def _sum(t: Totals) -> Iterator[Finding]:
    accounted = t.siblings_trained + t.siblings_filtered + t.siblings_evaluated + t.siblings_open
    if accounted != t.siblings_dispatched:
        parts = f"{t.siblings_trained} trained + {t.siblings_filtered} filtered"
        parts += f" + {t.siblings_evaluated} evaluated" if t.siblings_evaluated else ""
        yield problem(
            f"{t.siblings_dispatched} siblings dispatched, but {parts} + {t.siblings_open} open"
            f" = {accounted}",
            "totals",
        )


def _open_groups(index: RunIndex) -> Iterator[Finding]:
    held = index.in_batches()
    for group, opened in index.opened.items():
        if group not in index.fates:
            yield note(_why_open(index, group, opened[0].job, held), f"group {group}")


def _why_open(index: RunIndex, group: str, job: str, held: dict[str, list[int]]) -> str:
    if group in held:
        return f"open: in batch {held[group][-1]}, which is not yet acknowledged"
    missing, unusable = [], []
    for sibling in range(index.size(group)):
        labelled = index.outcome(group, sibling)
        if labelled is None:
            missing.append(str(sibling))
        elif not labelled.label.outcome.valid:
            unusable.append(f"{sibling} ({labelled.label.cause})")
    if index.cancelled(job):
        return f"open: its job {job} was cancelled"
    if missing:
        return f"open: siblings not finished: {', '.join(missing)}"
    if unusable:
        return f"open: siblings to be repaired or judged: {', '.join(unusable)}"
    what = "its fate" if index.evaluates(group) else "a trainer"
    return f"open: complete, waits in the bank for {what}"
