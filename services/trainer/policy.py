"""The seat for a policy: what the driver needs from whatever is being trained.

Promise of an implementation: `train` either moves the weights by one whole step and returns, or
raises; if it raises after it had begun to move them, the policy is spent and every later call of it
raises, so half a step is never saved, published or trained on. `write` then `load` of the same
folder gives the same next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from services.trainer.figures import Mismatch, StepFigures
from services.trainer.plan import StepPlan

Stop = Callable[[], bool]
"""Asked between pieces of work (a second or so apart): True ends it with `Stopped`."""


class Stopped(Exception):
    """The process is asked to end; what was under way is as if it had never begun."""


Judge = Callable[[dict[str, Mismatch]], bool]
"""Hears what the proximal recompute found of each trajectory, by id; True: take the step."""


class SentBack(Exception):
    """The judge did not want the step: the weights are as they were."""


class Policy(Protocol):
    """Runs in a worker thread; one call at a time."""

    def train(
        self, plan: StepPlan, stop: Stop, judge: Judge = lambda measured: True
    ) -> StepFigures:
        """One optimizer step over the whole plan; no step when nothing in it has credit. Raises
        SentBack, before any weight has moved, when `judge` says no."""

    def engine_state(self) -> dict[str, Any]:
        """Tensors as an engine loads them, by checkpoint name, in a fixed order.

        They are the live weights: copy them or be done before the next `train`.
        """

    def write(self, folder: str, stop: Stop) -> None:
        """Put weights (loadable as a model folder) and optimizer state into an empty folder."""
