"""Versions on their way, held against what was promised of them.

Owns: the checks of publications (DESIGN §5: 5, 8, 12): a version is sent after its record and never
before an older one, the trainer runs no further ahead than it may, and never trains on groups that
the bound on lag did not allow. Promise: told by trainer and replicas at the moment itself. Does not
cover: the tokens of a version (leased.py), records (checks.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.checks import Checks
from sim.engine import Replica
from sim.models import Model
from sim.trainer import Checkpoint, Trainer


class PublicationChecks:
    """Hears of every step, publication and checkpoint."""

    def __init__(self, checks: Checks, model: Model, trainer: Trainer, replicas: Sequence[Replica]):
        self.checks, self.model, self.trainer = checks, model, trainer
        self.overlapped = 0  # steps that were begun while a version was on its way
        self._served: dict[str, tuple[str, int, int]] = {}  # life, trainer, version
        trainer.on_train, trainer.on_publish = self._on_train, self._on_publish
        hears, trainer.on_save = trainer.on_save, self._on_save
        self._hears = hears
        for replica in replicas:
            replica.on_served = self._on_served

    def _problem(self, text: str) -> None:
        self.checks.problems.append(text)

    def _on_train(self, step: int) -> None:
        unpublished = self.trainer.unpublished
        self.overlapped += bool(unpublished)
        if len(unpublished) > self.model.ahead_max:
            self._problem(f"12: step {step} is trained while {unpublished} are unpublished")
        published = self.checks.facts.published_step
        lag = step - 1 - published
        if lag > self.model.lag_max and not self.checks.gaps:
            self._problem(f"12: step {step} is trained, {lag} after the published {published}")

    def _on_publish(self, version: int) -> None:
        if not self.checks.of_record(version):
            self._problem(f"5: version {version} is sent and is of no record")

    def _on_served(self, replica: Replica, epoch: int) -> None:
        at = (replica.life_id, epoch, replica.version)
        life, before, version = self._served.get(replica.name, at)
        if (life, before) == at[:2] and replica.version < version:
            self._problem(f"8: {replica.name} got {replica.version} after {version}")
        self._served[replica.name] = at

    def _on_save(self, checkpoint: Checkpoint) -> None:
        """One version for each step of its history, each the parent of the next."""
        self._hears(checkpoint)
        parents, at, versions = checkpoint.lineage.parents, checkpoint.record.version, 0
        while at:
            versions += 1
            at = parents[at]
        if versions != checkpoint.step:
            where = f"the checkpoint of step {checkpoint.step}"
            self._problem(f"2: {where} has {versions} versions in its history")
