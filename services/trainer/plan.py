"""What one optimizer step trains on.

Owns: `StepPlan`, made from a leased batch. Promise: only valid episodes are in it, each with the
advantage of its group, and every sampled token is of this run's versions.
Does not cover: the forward pass (adapters), the order of steps (schedule.py).
"""

from __future__ import annotations

from muster.advantage import Credit, Estimator, assign_credit
from muster.layout import Sequence, lay_out
from muster.leased import TrainBatch
from muster.types import Value
from services.trainer.figures import StepFigures, StepReport
from services.trainer.lineage import Lineage, trajectory_lag
from services.trainer.returns import compared


class StepPlan(Value, frozen=True):
    """Sequences with one advantage each, and what is known before the first forward pass."""

    step: int
    sequences: tuple[Sequence, ...]
    advantages: tuple[float, ...]
    ids: tuple[str, ...]  # of the batch's trajectories, by their index
    credit: Credit
    lag_mean_versions: float
    lags: dict[int, int] = {}  # of every version that sampled something here

    @property
    def trajectories(self) -> int:
        """Episodes with sampled tokens that count."""
        return len({sequence.trajectory for sequence in self.sequences})

    @property
    def with_contrast(self) -> tuple[int, ...]:
        """Indexes of the sequences whose group gives a gradient.

        By the group and not by the advantage: a sibling at its group's mean has none, but its
        tokens count in the token mean, whatever the last bit of that advantage says.
        """
        return self._where(True)

    @property
    def without_contrast(self) -> tuple[int, ...]:
        """Indexes of the other sequences: held aside from the loss."""
        return self._where(False)

    def _where(self, contrast: bool) -> tuple[int, ...]:
        giving = {group.group for group in self.credit.groups if group.has_variance}
        found = enumerate(self.sequences)
        return tuple(i for i, sequence in found if (sequence.group in giving) is contrast)

    @property
    def tokens(self) -> int:
        """Sampled tokens that count."""
        return sum(len(sequence.sampled) for sequence in self.sequences)


def plan_step(batch: TrainBatch, lineage: Lineage, estimator: Estimator = "grpo") -> StepPlan:
    """Raises InvalidInput for a batch that cannot be trained on truthfully."""
    credit = assign_credit(batch.trajectories, estimator)
    sequences: list[Sequence] = []
    advantages: list[float] = []
    lags: list[int] = []
    for index, item in enumerate(batch.trajectories):
        if (item.group, item.sibling) not in credit.advantages:
            continue
        lag = trajectory_lag(lineage, item)
        if lag is not None:
            lags.append(lag)
        for sequence in lay_out(index, item):
            sequences.append(sequence)
            advantages.append(credit.advantages[item.group, item.sibling])
    versions = {version for sequence in sequences for version in sequence.versions}
    return StepPlan(
        step=batch.step,
        sequences=tuple(sequences),
        advantages=tuple(advantages),
        ids=tuple(item.id for item in batch.trajectories),
        credit=credit,
        lag_mean_versions=sum(lags) / len(lags) if lags else 0.0,
        lags={version: lineage.lag(version) for version in versions},
    )


def report_step(
    plan: StepPlan, figures: StepFigures, train_s: float, batch: TrainBatch | None = None
) -> StepReport:
    """Join what was planned and measured, and what the bank said of the batch."""
    predicted, measured = compared(batch, figures.per_trajectory) if batch else (None, None)
    return StepReport(
        step=plan.step,
        figures=figures,
        tokens=plan.tokens,
        trajectories=plan.trajectories,
        groups_with_variance=plan.credit.groups_with_variance,
        groups=len(plan.credit.groups),
        excluded=sum(group.excluded for group in plan.credit.groups),
        lag_mean_versions=plan.lag_mean_versions,
        train_s=train_s,
        groups_returned=len(batch.frozen.returned) if batch else 0,
        predicted_kl=predicted,
        measured_kl=measured,
    )
