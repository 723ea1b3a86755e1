"""What Redis holds of a run, in memory: ordered streams, deduplicated, fenced.

Owns: the durable side of the simulation. Promise: the same rules as muster.streams: an entry is
written at most once by its dedupe field, an older epoch's append is refused. Entries are kept as
the events that the bank makes of them. A second and different fate, or composition, of the same
group or step is kept in `conflicts`: there must be none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.readybank import events as e

READ_BY_BANK = ("versions", "jobs", "events", "outcomes")  # in the order of feeding at start


@dataclass
class RunStore:
    """The streams of one run."""

    streams: dict[str, list[e.BankEvent]] = field(
        default_factory=lambda: {s: [] for s in READ_BY_BANK}
    )
    batches: dict[int, e.Batch] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    fates: dict[str, e.FateRecord] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    owner_epoch: int = 0
    bank_epoch: int = 0
    _seen: set[str] = field(default_factory=set)

    def append(
        self, entries: Sequence[tuple[str, str, e.BankEvent]], owner: int | None = None
    ) -> bool:
        """Write (stream, dedupe, event) entries whole; False for a former owner."""
        if owner is not None and owner != self.owner_epoch:
            return False
        for stream, dedupe, event in entries:
            if f"{stream}/{dedupe}" not in self._seen:
                self._seen.add(f"{stream}/{dedupe}")
                self.streams[stream].append(event)
        return True

    def write(self, command: e.BankCommand, bank: int) -> e.BankEvent | None:
        """Execute a bank's write; its result. None for a former bank, or no result."""
        if bank != self.bank_epoch:
            return None
        if isinstance(command, e.WriteFrozen):
            if self.batches.setdefault(command.batch.step, command.batch) != command.batch:
                self.conflicts.append(f"step {command.batch.step} was frozen twice")
            return e.BatchFrozen(command.batch.step)
        if isinstance(command, e.WriteTrained):
            self.trained.add(command.batch.step)
            for fate in command.fates:
                self._fate(fate)
            return e.BatchTrained(command.batch.step)
        if isinstance(command, e.WriteFate):
            self._fate(command.fate)
        return None

    def _fate(self, fate: e.FateRecord) -> None:
        if self.fates.setdefault(fate.group, fate) != fate:
            self.conflicts.append(f"group {fate.group} has two fates")

    def recovery(self) -> list[e.BankEvent]:
        """What a bank that starts now reads, in the order in which it is fed."""
        batches = [e.BatchRestored(b, s in self.trained) for s, b in sorted(self.batches.items())]
        fates = [e.FateRestored(f.group, f.fate) for f in self.fates.values()]
        read = [event for name in READ_BY_BANK for event in self.streams[name]]
        return [*batches, *fates, *read]
