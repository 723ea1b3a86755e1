"""A run's store whose newest records can be lost, as by a power cut with `appendfsync everysec`."""

from __future__ import annotations

from services.readybank import events as e
from sim.store import RunStore


class LossyStore(RunStore):
    """Remembers the order of the bank's own records; what others wrote is never lost here."""

    def __init__(self) -> None:
        super().__init__()
        self._written: list[e.BankCommand] = []

    def write(self, command: e.BankCommand, bank: int) -> e.BankEvent | None:
        """See RunStore."""
        if isinstance(command, e.WriteFrozen | e.WriteTrained | e.WriteFate):
            self._written.append(command)
        return super().write(command, bank)

    def lose(self, records: int) -> None:
        """The last `records` that the bank wrote are gone."""
        kept = self._written[: max(0, len(self._written) - records)]
        self._written = []
        self.batches, self.trained, self.fates = {}, set(), {}
        for command in kept:
            self.write(command, self.bank_epoch)
