"""What must hold after every event of a simulation.

Owns: the invariants of DESIGN §5 that the two machines answer for. Promise: `violations` looks at
the store and at what the trainer got, never into a machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.readybank import events as e
from sim.models import Model
from sim.store import RunStore
from sim.trainer import Trainer


class Violation(AssertionError):
    """An invariant does not hold."""


class Checks:
    """Incremental: each batch and each lease is looked at once."""

    def __init__(self, store: RunStore, trainer: Trainer, model: Model):
        self._store, self._trainer, self._model = store, trainer, model
        self._group_of: dict[str, int] = {}  # group → its step
        self._sent: dict[int, tuple[e.LeasedGroup, ...]] = {}
        self._batches = self._leases = 0

    def __call__(self) -> None:
        for problem in self.violations():
            raise Violation(problem)

    def violations(self) -> Iterator[str]:
        yield from self._store.conflicts
        for step in sorted(self._store.batches)[self._batches :]:
            self._batches += 1
            yield from self._frozen(self._store.batches[step])
        for lease in self._trainer.leases[self._leases :]:
            self._leases += 1
            yield from self._leased(lease)
        learned = [m.group for batch, _ in self._trainer.history for m in batch.members]
        if len(learned) != len(set(learned)):
            yield "a checkpoint was trained on a group twice"

    def _frozen(self, batch: e.Batch) -> Iterator[str]:
        if len(batch.members) != self._model.groups_per_batch:
            yield f"step {batch.step} has {len(batch.members)} groups"
        for member in batch.members:
            if member.group in self._group_of:
                yield f"{member.group} is in steps {self._group_of[member.group]} and {batch.step}"
            self._group_of[member.group] = batch.step
            if member.group in self._store.fates:
                yield f"{member.group} had its fate before step {batch.step}"
            if len(member.attempts) != self._model.group_size:
                yield f"{member.group} has {len(member.attempts)} siblings"

    def _leased(self, lease: e.SendBatch) -> Iterator[str]:
        step = lease.batch.step
        if lease.batch != self._store.batches.get(step):
            yield f"step {step} was sent before it was durable, or otherwise"
        if lease.groups != self._sent.setdefault(step, lease.groups):
            yield f"step {step} was sent twice and not the same"
        for group in lease.groups:
            for sibling in group.siblings:
                yield from self._whole(group.group, sibling)

    def _whole(self, group: str, sibling: e.LeasedSibling) -> Iterator[str]:
        """The attempt is the newest there is, and all that it recorded is leased."""
        of = [
            x
            for x in self._store.streams["events"]
            if isinstance(x, e.TurnRecorded | e.EpisodeRecorded)
            and (x.episode.group, x.episode.sibling) == (group, sibling.sibling)
        ]
        where = f"{group}.{sibling.sibling}.{sibling.attempt}"
        if max(x.episode.attempt for x in of) != sibling.attempt:
            yield f"{where} was leased, and is not the newest attempt"
        mine = [x for x in of if x.episode.attempt == sibling.attempt]
        keys = tuple(x.payload_key for x in mine if isinstance(x, e.TurnRecorded))
        if sibling.label.outcome.valid and sibling.payload_keys != keys:
            yield f"{where} was leased with other turns than it recorded"

    def opened(self) -> int:
        """Groups that are durable."""
        return sum(isinstance(x, e.GroupOpened) for x in self._store.streams["events"])
