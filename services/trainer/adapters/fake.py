"""Stand-ins for the outer world, without torch: tests drive everything around the training.

Promise: same contract as the real adapters, nothing random, nothing slow. `trainer.policy = "fake"`
runs the service itself on `FakeTensors`, which trains nothing and sends real tensors, or, with
`trainer.transport = "none"`, on `FakePolicy` and `UnsentFleet`, which need no torch at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from muster.errors import Unavailable
from muster.registry import Registry
from muster.streams import reaching_redis
from services.trainer.adapters import model_files
from services.trainer.batch import FrozenBatch, TrainBatch
from services.trainer.figures import StepFigures
from services.trainer.plan import StepPlan
from services.trainer.policy import Stop, Stopped
from services.trainer.ports import (
    KnownVersion,
    Publication,
    Registration,
    ReplicaReport,
    VersionRecord,
)

FAKE_FILE = "fake.json"


class FakePolicy:
    """Its one weight remembers which steps it was trained on. `slow` waits for the stop."""

    def __init__(self, steps: list[int] | None = None, *, slow: bool = False):
        self.steps = steps or []
        self.training = threading.Event()
        self._slow = slow

    @classmethod
    def load(cls, folder: Path) -> FakePolicy:
        """What `write` left there; a fresh one from any other folder."""
        path = folder / FAKE_FILE
        return cls(json.loads(path.read_text("utf-8")) if path.is_file() else None)

    def train(self, plan: StepPlan, stop: Stop) -> StepFigures:
        """See Policy."""
        self.training.set()
        while self._slow and not stop():
            threading.Event().wait(0.01)
        if stop():
            raise Stopped
        self.steps.append(plan.step)
        return StepFigures(loss=0.5, grad_norm=1.0, step_kl=1e-4)

    def engine_state(self) -> dict[str, Any]:
        """See Policy."""
        return {"steps": list(self.steps)}

    def write(self, folder: str, stop: Stop) -> None:
        """See Policy."""
        del stop
        (Path(folder) / FAKE_FILE).write_text(json.dumps(self.steps), encoding="utf-8")


class FakeTensors(FakePolicy):
    """The weights of a model folder; a step adds a quarter to the first of them."""

    def __init__(self, tensors: dict[str, Any], side_files: dict[str, bytes], steps: list[int]):
        super().__init__(steps)
        self._tensors, self._side_files = tensors, side_files

    @classmethod
    def load(cls, folder: Path) -> FakeTensors:
        """A model folder, or what `write` left."""
        from safetensors.torch import load_file

        tensors = load_file(folder / model_files.WEIGHTS)
        steps = FakePolicy.load(folder).steps
        return cls(tensors, model_files.read_side_files(folder), steps)

    def train(self, plan: StepPlan, stop: Stop) -> StepFigures:
        """See Policy."""
        figures = super().train(plan, stop)
        first = self._tensors[min(self._tensors)]
        first.copy_(first.float() + 0.25)
        return figures

    def engine_state(self) -> dict[str, Any]:
        """See Policy."""
        return self._tensors

    def write(self, folder: str, stop: Stop) -> None:
        """See Policy."""
        super().write(folder, stop)
        model_files.write_side_files(Path(folder), self._side_files)
        model_files.write_weights(Path(folder), self._tensors)


class FakeBank:
    """Leases the batches it was given, in order; remembers what was acknowledged."""

    def __init__(self, batches: dict[int, TrainBatch]):
        self.batches, self.acknowledged = batches, [0]
        self.registered: list[int] = []
        self.brought: list[FrozenBatch | None] = []
        self.oldest_kept = 0
        self.away = 0  # so many calls fail before the next succeeds
        self.drained = asyncio.Event()  # a lease waits for a batch that does not exist

    async def register(
        self, last_durable_step: int, last_batch: FrozenBatch | None, oldest_kept_step: int
    ) -> Registration:
        """See ports.Bank."""
        self._reach()
        self.oldest_kept = oldest_kept_step
        self.registered.append(last_durable_step)
        self.brought.append(last_batch)
        unseen = tuple(step for step in sorted(self.batches) if step > last_durable_step)
        return Registration(last_durable_step + 1, unseen)

    async def lease(self, step: int) -> TrainBatch:
        """See ports.Bank."""
        self._reach()
        if step not in self.batches:
            self.drained.set()
            await asyncio.Event().wait()
        return self.batches[step]

    async def acknowledge(self, step: int, oldest_kept_step: int) -> int:
        """See ports.Bank."""
        self._reach()
        self.oldest_kept = oldest_kept_step
        self.acknowledged.append(step)
        return len(self.batches[step].groups)

    def _reach(self) -> None:
        if self.away:
            self.away -= 1
            raise Unavailable("the bank restarts")


class FakeVersionLog:
    """Keeps records in memory, one per (version, stage)."""

    def __init__(self) -> None:
        self.records: list[VersionRecord] = []

    async def known(self) -> dict[int, KnownVersion]:
        """See ports.VersionLog."""
        return {r.version: KnownVersion(r.parent, r.digest) for r in self.records}

    async def append(self, record: VersionRecord) -> None:
        """See ports.VersionLog."""
        if (record.version, record.stage) not in {(r.version, r.stage) for r in self.records}:
            self.records.append(record)


class FakeFleet:
    """Replicas that take any version; `failing` ones report an error."""

    def __init__(self, *names: str):
        self.serving = dict.fromkeys(names, 0)
        self.failing: set[str] = set()
        self.published: list[int] = []

    def digest(self, state: dict[str, Any], version: int, parent: int) -> str:
        """See ports.Fleet."""
        del version, parent
        return _digest(state)

    async def publish(
        self, state: dict[str, Any], version: int, parent: int, skip: Collection[str] = ()
    ) -> Publication:
        """See ports.Fleet."""
        del state, parent
        served = self.serving.items()
        stale = [name for name, at in served if at != version and name not in skip]
        reports = []
        for name in stale:
            failed = name in self.failing
            reports.append(ReplicaReport(name, error="it fails" if failed else ""))
            self.serving[name] = self.serving[name] if failed else version
        if stale:
            self.published.append(version)
        serving = sum(at == version for at in self.serving.values())
        return Publication(tuple(reports), serving)


class UnsentFleet:
    """Every replica that has announced itself is said to have taken a version; nothing is sent."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._served: tuple[int, frozenset[str]] = (0, frozenset())

    def digest(self, state: dict[str, Any], version: int, parent: int) -> str:
        """See ports.Fleet."""
        del version, parent
        return _digest(state)

    async def publish(
        self, state: dict[str, Any], version: int, parent: int, skip: Collection[str] = ()
    ) -> Publication:
        """See ports.Fleet."""
        del state, parent, skip
        with reaching_redis():
            there = frozenset(e.id for e in await self._registry.list("inference"))
        before, served = self._served
        self._served = version, there
        fresh = there - served if before == version else there
        return Publication(tuple(ReplicaReport(name) for name in sorted(fresh)), len(there))


def _digest(state: dict[str, Any]) -> str:
    """Of plain values, or of what prints as its own values."""
    return hashlib.sha256(json.dumps(state, sort_keys=True, default=repr).encode()).hexdigest()
