"""What the service runs on when nothing is to be trained (`trainer.policy = "fake"`).

Promise: same contract as the real adapters, nothing random, nothing slow. `FakeTensors` trains
nothing and sends real tensors; with `trainer.transport = "none"` `FakePolicy` and `UnsentFleet`
take its place, which need no torch at all.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any
from zlib import crc32

from muster.registry import Registry
from muster.streams import reaching_redis
from services.trainer.adapters import model_files
from services.trainer.figures import Mismatch, StepFigures
from services.trainer.plan import StepPlan
from services.trainer.policy import Judge, SentBack, Stop, Stopped
from services.trainer.ports import Publication, ReplicaReport

FAKE_FILE = "fake.json"
KL_MAX = 0.01


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

    def train(
        self, plan: StepPlan, stop: Stop, judge: Judge = lambda measured: True
    ) -> StepFigures:
        """See Policy. What it finds of a trajectory is between 0 and KL_MAX, by its id."""
        self.training.set()
        while self._slow and not stop():
            threading.Event().wait(0.01)
        if stop():
            raise Stopped
        ids = {plan.ids[sequence.trajectory] for sequence in plan.sequences}
        found = {id_: Mismatch(tokens=1, k3=_kl_of(id_)) for id_ in sorted(ids)}
        if not judge(found):
            raise SentBack
        self.steps.append(plan.step)
        return StepFigures(
            loss=0.5, grad_norm=1.0, step_kl=1e-4, step_kl_tokens=1, per_trajectory=found
        )

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

    def train(
        self, plan: StepPlan, stop: Stop, judge: Judge = lambda measured: True
    ) -> StepFigures:
        """See Policy."""
        figures = super().train(plan, stop, judge)
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


class UnsentFleet:
    """Every replica that has announced itself is said to have taken a version; nothing is sent."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._served: tuple[int, frozenset[str]] = (0, frozenset())

    def take(self, state: dict[str, Any], version: int, parent: int) -> str:
        """See ports.Fleet."""
        del version, parent
        return _digest(state)

    async def newest(self) -> int:
        """See ports.Fleet."""
        return 0

    async def publish(self, version: int, parent: int, skip: Collection[str] = ()) -> Publication:
        """See ports.Fleet."""
        del parent, skip
        with reaching_redis():
            there = frozenset(e.id for e in await self._registry.list("inference"))
        before, served = self._served
        self._served = version, there
        fresh = there - served if before == version else there
        return Publication(tuple(ReplicaReport(name) for name in sorted(fresh)), len(there))


def _kl_of(trajectory: str) -> float:
    return KL_MAX * (crc32(trajectory.encode()) % 1000) / 1000


def _digest(state: dict[str, Any]) -> str:
    """Of plain values, or of what prints as its own values."""
    return hashlib.sha256(json.dumps(state, sort_keys=True, default=repr).encode()).hexdigest()
