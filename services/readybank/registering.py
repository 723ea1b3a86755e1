"""A trainer that registers, and the batches that its checkpoint brings back.

Owns: what becomes of them. Promise: pure; all that it brings is taken, or nothing is; a group that
stood in an older revision of a batch that it brings was given back, and is filtered as such. Does
not cover: whether the trainer may register (lease.py).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from muster.types import Fate
from services.readybank import events as e
from services.readybank.refusals import in_two_batches
from services.readybank.returning import REASON

if TYPE_CHECKING:
    from services.readybank.machine import BankMachine

BEFORE = f"{REASON}before"


def register(bank: BankMachine, event: e.TrainerRegistered) -> list[e.BankCommand]:
    """See the module."""
    brought = bank.leases.brought(event)
    places = Counter(member.group for batch in brought for member in batch.members)
    outdated = [bank.leases.batch(batch.step) for batch in brought]
    former = {member.group for batch in outdated if batch for member in batch.members}
    for group, count in places.items():
        if count > 1 or (_in_a_batch(bank, group) and group not in former):
            return [in_two_batches(event.call, brought, group)]
    commands: list[e.BankCommand] = []
    for group in sorted(former - places.keys()):
        if bank.groups[group].filtered:  # one fate a group
            bank.close(group, Fate.FILTERED)
        else:
            commands += bank.filter(group, BEFORE)
    for batch in brought:
        bank.freeze(batch)
        commands.append(e.WriteFrozen(batch))
    steps, answers = bank.leases.register(event)
    return [*commands, *bank.write_trained(steps), *answers]


def _in_a_batch(bank: BankMachine, group: str) -> bool:
    known = bank.groups.get(group)
    return bank.retiring.gone(group) or (known is not None and known.pinned is not None)
