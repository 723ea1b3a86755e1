"""The bank's real Clearing over the modelled store.

Owns: the archive in place of files. Promise: each effect on the store is a call that may fail. Does
not cover: what is over (services/readybank/retire.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from muster.streams import Received
from services.readybank import events as e
from services.readybank.adapters.clearing import Clearing
from sim.client import ModelRedis
from sim.streams import ModelStreams

if TYPE_CHECKING:
    from sim.bank import Bank


class Retirer:
    """Of one bank incarnation."""

    def __init__(self, bank: Bank, streams: ModelStreams):
        self.bank = bank
        assert bank.machine is not None
        self.clearing = Clearing(
            ModelRedis(bank.store),  # type: ignore[arg-type]
            streams,  # type: ignore[arg-type]
            self._archive,
            bank.machine.retiring.gone,
            epoch=bank.epoch,
        )

    async def _archive(self, entries: list[Received]) -> None:
        """In memory, shared by all banks, as a disk is."""
        self.bank.shared.archive.extend(entries)

    def execute(self, command: Any) -> bool:
        """False when it is none of its."""
        bank, clearing = self.bank, self.clearing
        if isinstance(command, e.WriteMark):
            done = e.MarkWritten(command.step)
            work = partial(clearing.mark, command)
            bank.patiently_slowly(work, lambda _: bank.feed(done), "WriteMark")
        elif isinstance(command, e.RetireGroups):
            self._retire(command, 0)
        elif isinstance(command, e.TrimStreams):
            trim = partial(clearing.trim, command)
            bank.patiently_slowly(trim, lambda _: bank.feed(e.StreamsTrimmed()), "Trim")
        else:
            return False
        return True

    def _retire(self, command: e.RetireGroups, at: int) -> None:
        """One group after the other."""
        if at == len(command.groups):
            self.bank.feed(e.GroupsRetired(tuple(over.group for over in command.groups)))
            return
        work = partial(self.clearing.retire, command.groups[at])
        self.bank.patiently_slowly(work, lambda _: self._retire(command, at + 1), "Retire")
