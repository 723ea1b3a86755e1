"""The trainer process with a policy whose versions go round in a ring of three sets of weights.

    python -m tests.faults.cycling_trainer --config FILE

Everything is the trainer's own (driver, checkpoints, snapshots, publisher) but the step, which is
slow enough to be killed in and sets the weights of ring place STEP mod 3. So three fresh engines
say what every version of the run must answer.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from services.trainer.adapters import fake
from services.trainer.figures import StepFigures
from services.trainer.plan import StepPlan
from services.trainer.policy import Judge, Stop, Stopped

RING = 3
CHANGED = "down_proj"
TRAIN_S = "MUSTER_TEST_TRAIN_S"  # names a file with the seconds of a step


def weights_at(base: dict[str, Any], place: int) -> dict[str, Any]:
    """The weights of a place of the ring; 0 is the model that the run began with."""
    factor = 1.0 + 0.05 * place
    return {n: t * factor if place and CHANGED in n else t for n, t in base.items()}


class RingTensors(fake.FakeTensors):
    """`steps` says where it stands, also after a restart."""

    base: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> RingTensors:
        """As FakeTensors; the model of the run is named in the environment."""
        from safetensors.torch import load_file

        cls.base = load_file(Path(os.environ["MUSTER_TEST_BASE"]) / "model.safetensors")
        loaded = super().load(folder)
        assert isinstance(loaded, cls)
        return loaded

    def train(
        self, plan: StepPlan, stop: Stop, judge: Judge = lambda measured: True
    ) -> StepFigures:
        """Waits, then takes the next place."""
        threading.Event().wait(float(Path(os.environ[TRAIN_S]).read_text("ascii")))
        if stop():
            raise Stopped
        self.steps.append(plan.step)
        place = weights_at(self.base, plan.step % RING)
        for name, tensor in self._tensors.items():
            if CHANGED in name:
                tensor.copy_(place[name])  # in place, as an optimizer does
        return StepFigures(loss=0.5, grad_norm=1.0, step_kl=1e-4)


def main() -> int:
    """The trainer's own main, with that policy as its fake one."""
    fake.FakeTensors = RingTensors  # type: ignore[misc]
    from services.trainer.__main__ import main as trainer

    return trainer()


if __name__ == "__main__":
    sys.exit(main())
