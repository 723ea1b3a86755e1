"""What goes into the batch that is waited for, and what a lease is sent.

Owns: the making of batches out of ready groups, their topping up, the content of a lease. Promise:
pure; a batch is made, or topped up, only while its lease waits and enough groups are ready; what is
sent is durable. Does not cover: which groups go first (batch.py), whose turn it is (lease.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from services.readybank import events as e
from services.readybank.assembly import GroupAssembly
from services.readybank.batch import NEVER, choose
from services.readybank.lease import Waiting
from services.readybank.returning import returns_left

if TYPE_CHECKING:
    from services.readybank.machine import BankMachine


def serve(bank: BankMachine) -> list[e.BankCommand]:
    """Freeze the batch that is waited for, or send it when it is durable."""
    commands: list[e.BankCommand] = []
    wanted = bank.leases.wants()
    batch = _composed(bank, wanted) if wanted else None
    if batch:
        bank.freeze(batch)
        commands.append(e.WriteFrozen(batch))
    due = bank.leases.due()
    if due:
        commands.append(_send(bank, due[0].call, due[1]))
    return commands


def opened_in(bank: BankMachine, step: int) -> float:
    """When the first group of a batch was opened; unknown counts as long ago."""
    batch = bank.leases.batch(step)
    known = [bank.groups.get(m.group) for m in batch.members] if batch else []
    return min((g.opened_unix_s for g in known if g and g.opened), default=NEVER)


def _composed(bank: BankMachine, wanted: Waiting) -> e.Batch | None:
    """A new batch, or one that lacks groups with others in their place."""
    short = bank.leases.short.get(wanted.step)
    lacks = short.lacks if short else wanted.groups
    if len(bank.ready) < lacks:
        return None
    newest = bank.leases.newest
    before = bank.overtaken.before(newest, lambda step: opened_in(bank, step))
    chosen = choose(bank.ready, lacks, before)
    members = tuple(e.BatchMember(g, _attempts(bank.groups[g])) for g in chosen)
    complete = max(bank.ready[g].complete_unix_s for g in chosen)
    batch = e.Batch(
        step=wanted.step,
        members=members,
        asked_unix_s=wanted.asked_unix_s,
        complete_unix_s=complete,
        trainer_epoch=bank.leases.epoch,
        policy_version=bank.lineage.published,
    )
    if short is None:
        return batch
    return replace(
        short,
        members=(*short.members, *members),
        complete_unix_s=max(short.complete_unix_s, complete),
        trainer_epoch=batch.trainer_epoch,
        policy_version=batch.policy_version,
    )


def _attempts(group: GroupAssembly) -> tuple[int, ...]:
    return tuple(attempt.number for attempt in group.members())


def _send(bank: BankMachine, call: str, batch: e.Batch) -> e.BankCommand:
    groups = [bank.groups[m.group] for m in batch.members]
    for group in groups:
        missing = group.missing(repairs_max=0)  # pinned attempts are final, whatever they are
        if missing:
            return e.RefuseCall(
                call,
                f"the streams no longer hold {missing} of group {group.group}",
                "step",
                str(batch.step),
                "restore the Redis data of this run, or start a new run",
            )
    leased = tuple(_leased(bank, group) for group in groups)
    return e.SendBatch(call, batch, leased, returns_left(bank.leases, batch))


def _leased(bank: BankMachine, group: GroupAssembly) -> e.LeasedGroup:
    """With what is known of the drift of each valid sibling."""
    found = group.leased()
    siblings = []
    for sibling, attempt in zip(found.siblings, group.members(), strict=True):
        told: tuple[float | None, float | None] = (None, None)
        if sibling.label.outcome.valid:
            told = bank.drifts.figures(group.group, sibling.sibling, attempt)
        siblings.append(replace(sibling, predicted_kl=told[0], scored_kl=told[1]))
    return replace(found, siblings=tuple(siblings))
