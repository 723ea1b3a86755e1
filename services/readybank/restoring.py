"""What a bank is told at its start of what a former one wrote.

Owns: the events of that (events.py says in which order they come). Promise: pure; afterwards the
machine stands where the streams say, whatever its former incarnation was about to do. Does not
cover: entries of groups and versions, which are heard as ever (machine.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.types import Fate
from services.readybank import events as e

if TYPE_CHECKING:
    from services.readybank.machine import BankMachine


def mark(bank: BankMachine, event: e.MarkRestored) -> None:
    """Before the batches."""
    bank.leases.marked(event.step)
    bank.overtaken.restore(event.step, event.opened)


def batch(bank: BankMachine, event: e.BatchRestored) -> None:
    """Of a step, the newest revision."""
    found = event.batch
    bank.pin(found)
    (bank.leases.short if found.lacks else bank.leases.frozen)[found.step] = found
    bank.leases.epoch = max(bank.leases.epoch, found.trainer_epoch)
    if event.trained:
        bank.leases.trained.add(found.step)


def fate(bank: BankMachine, event: e.FateRestored) -> None:
    """After the batches."""
    if event.fate is Fate.TRAINED or bank.retiring.gone(event.group):
        return
    group = bank.group(event.group)
    group.fate, group.told = event.fate, True
    group.reason = event.reason
    if group.pinned is None:  # else a checkpoint has it, and the batch may be sent again
        bank.close(event.group, event.fate)
