"""What a batch or a group waits for, for people.

Owns: those texts. Promise: pure; the outermost first, the oldest group first, each with what it
lacks, since when (Unix seconds of the streams), who has to move and what to run next; at most
LINES_MAX lines; groups of an evaluation, which no batch takes, are not counted. Does not cover:
what an episode is doing (the router explains it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.types import Waiting
from services.readybank import lease
from services.readybank.assembly import Attempt, GroupAssembly

if TYPE_CHECKING:
    from services.readybank.machine import BankMachine

LINES_MAX = 50
OPEN_MAX = 1000
ROUTER, TRAINER, BANK = "router", "trainer", "readybank"
ROUTER_OR_CLIENT = "the router for a running job, else whoever submits jobs"


def waits_for(bank: BankMachine) -> str:
    """In one line: how many groups stand where, and what the first open one lacks."""
    held, ready = len(bank.held), len(bank.ready)
    text = f"{ready} ready, {held} held, {len(_for_batches(bank)) - held} open"
    if bank.held:
        group = min(bank.held)
        return f"{text}; {group} is held: {bank.held[group][1]}"
    first = min(_for_batches(bank), key=lambda g: g.group, default=None)
    return f"{text}; {first.group} waits for {_lacks(bank, first)}" if first else text


def _for_batches(bank: BankMachine) -> list[GroupAssembly]:
    """Open groups that are not ready and that a batch may yet be made of, the oldest first."""
    found = (bank.groups[name] for name in bank.open - bank.ready.keys())
    return sorted((g for g in found if not g.evaluates), key=lambda g: (g.opened_unix_s, g.group))


def stall(bank: BankMachine, waiting: lease.Waiting, left_out: int, newest: str) -> str:
    """The same for a lease that saw no progress."""
    short = bank.leases.short.get(waiting.step)
    wanted = short.lacks if short else waiting.groups
    text = f"step {waiting.step} waits for {wanted} groups: {waits_for(bank)}"
    lacks = min(bank.leases.lacking(), default=waiting.step)
    if lacks < waiting.step:
        text = f"step {waiting.step} waits until step {lacks} is leased again: it lacks groups"
    if left_out:
        text += f"; {left_out} unreadable entries left out, newest {newest}"
    return text


def batch(bank: BankMachine) -> tuple[list[Waiting], list[str]]:
    """What the next batch waits for, and the groups that it could still be made of."""
    oldest = _for_batches(bank)
    lines = [_batch(bank), *(_blocking(bank, g) for g in oldest[: LINES_MAX - 1])]
    return lines, [g.group for g in oldest[:OPEN_MAX]]


def _batch(bank: BankMachine) -> Waiting:
    ready, waiting = len(bank.ready), bank.leases.waiting
    if waiting is None:
        step = bank.leases.newest + 1
        told = f"the trainer to ask for it; groups are ready: {ready}"
        return Waiting(f"batch {step}", "not asked for", told, 0.0, TRAINER, "muster report")
    name, asked = f"batch {waiting.step}", waiting.asked_unix_s
    if waiting.step in bank.leases.freezing or waiting.step in bank.leases.returning:
        return Waiting(
            name, "frozen", "its record to become durable", asked, BANK, "muster explain"
        )
    lacks = min(bank.leases.lacking(), default=waiting.step)
    if lacks < waiting.step:
        told = f"batch {lacks} to be leased again: it lacks groups that were given back"
        return Waiting(name, "held up", told, asked, TRAINER, "muster explain")
    return Waiting(name, "collecting", *_lacking(bank, waiting), "muster explain")


def _lacking(bank: BankMachine, waiting: lease.Waiting) -> tuple[str, float, str]:
    """What a batch that was asked for lacks, since when, and who has to move."""
    ready, short = len(bank.ready), bank.leases.short.get(waiting.step)
    wanted = short.lacks if short else waiting.groups
    told = f"{wanted - ready} more groups: {ready} of {wanted} are ready"
    if short:
        told += f", in the place of those given back ({' '.join(short.returned)})"
    others = len(_for_batches(bank))
    if not others:
        told += ", and no other is open: a running job opens more, or one has to be submitted"
        return told, waiting.asked_unix_s, ROUTER_OR_CLIENT
    if ready + others < wanted:
        told += f", and only {ready + others} are open"
    return told, waiting.asked_unix_s, ROUTER


def _blocking(bank: BankMachine, group: GroupAssembly) -> Waiting:
    state, lacks = "open", _lacks(bank, group)
    owner = ROUTER
    if group.group in bank.held:
        state, owner = "held", TRAINER
        lacks = f"the record of a policy version: {bank.held[group.group][1]}"
        if bank.drifts.waits(group.group):
            owner, lacks = BANK, f"an idle replica: {bank.held[group.group][1]}"
    since = _since(bank, group)
    return Waiting(group.group, state, lacks, since, owner, f"muster explain {group.group}")


def group(bank: BankMachine, name: str) -> list[Waiting] | None:
    """The group, then each of its siblings; None when nothing is known of it."""
    if bank.retiring.gone(name):
        return [Waiting(name, "over", "nothing: it has its fate", 0.0, BANK, "muster audit")]
    found = bank.groups.get(name)
    if found is None:
        return None
    if found.closed:
        reason = f"{found.fate}: {found.reason}" if found.reason else str(found.fate)
        return [Waiting(name, reason, "nothing: it has its fate", 0.0, BANK, "muster audit")]
    lines = [_where(bank, found)]
    for number in range(found.opened.group_size if found.opened else 0):
        attempt = found.siblings.get(number)
        lines.append(_sibling(bank, found, number, attempt))
    return lines[:LINES_MAX]


def _where(bank: BankMachine, found: GroupAssembly) -> Waiting:
    name = found.group
    for step in sorted(bank.leases.steps()):
        frozen = bank.leases.batch(step)
        if frozen and any(m.group == name for m in frozen.members):
            over = step in bank.leases.trained
            state = f"trained in batch {step}" if over else f"in batch {step}"
            told = "checkpoints that may go back before it" if over else "the trainer's checkpoint"
            since = frozen.complete_unix_s
            return Waiting(name, state, told, since, TRAINER, "muster report")
    if name in bank.ready:
        return _ready(bank, name)
    return _blocking(bank, found)


def _ready(bank: BankMachine, name: str) -> Waiting:
    """A complete group waits for the trainer only while it has not asked."""
    since, waiting = bank.ready[name].complete_unix_s, bank.leases.waiting
    if waiting is None:
        told = "a batch: the trainer to ask for it"
        return Waiting(name, "ready", told, since, TRAINER, "muster explain batch")
    lacks, _, owner = _lacking(bank, waiting)
    others = _for_batches(bank)
    after = f"muster explain {others[0].group}" if others else "muster explain batch"
    told = f"batch {waiting.step}, which lacks {lacks}"
    return Waiting(name, "ready", told, since, owner, after)


def _sibling(
    bank: BankMachine, found: GroupAssembly, number: int, attempt: Attempt | None
) -> Waiting:
    if attempt is None:
        told, since = "its first turn", found.opened_unix_s
        return Waiting(
            f"{found.group}.{number}.0", "nothing recorded", told, since, ROUTER, "muster explain"
        )
    name = f"{found.group}.{number}.{attempt.number}"
    lacks = attempt.missing(found.rules(bank.rules).repairs_max)
    state = f"{len(attempt.turns)} turns recorded"
    if attempt.label is not None:
        state = f"{attempt.label.outcome} ({attempt.label.cause})"
    elif attempt.intended >= 0 and attempt.intended not in attempt.turns:
        state = f"turn {attempt.intended}: its command was about to run"
    since, after = attempt.at_unix_s, f"muster explain {name}"
    return Waiting(name, state, lacks, since, ROUTER if lacks else "", after if lacks else "")


def _lacks(bank: BankMachine, group: GroupAssembly) -> str:
    return group.missing(group.rules(bank.rules).repairs_max)


def _since(bank: BankMachine, group: GroupAssembly) -> float:
    """When the sibling it waits for last moved; a held group waits since it became complete."""
    if group.group in bank.held:
        return group.complete_unix_s
    repairs_max = group.rules(bank.rules).repairs_max
    size = group.opened.group_size if group.opened else 0
    for number in range(size):
        attempt = group.siblings.get(number)
        if attempt is None:
            return group.opened_unix_s
        if attempt.missing(repairs_max):
            return attempt.at_unix_s
    return group.opened_unix_s
