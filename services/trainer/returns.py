"""Groups that the trainer gives back to the bank instead of training on them.

Owns: which, and what a checkpoint has to keep because of them. Promise: pure; with `return_kl` 0
none goes back; never more than the batch's bank still takes back, and never a second time for a
batch that was acknowledged once. Does not cover: what the bank makes of it (the ready bank's
returning.py).

The measure is the proximal recompute, on the tokens that would be trained on: KL per token (k3) of
the engine's policy against the trainer's, of each trajectory; a group goes by its worst one, as the
bank's bound does. It holds what numerics and staleness add up to, so `return_kl` lies above what
the engine and the trainer differ by under the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muster.leased import FrozenBatch, GroupBack, TrainBatch
from muster.types import Value
from services.trainer.figures import Mismatch

REASON = "kl"
REVISED_MAX = 16
"""Steps for which a checkpoint keeps the batch of a step of which groups went back."""


class GroupsReturned(Value, frozen=True, tag=True):
    """Groups of the batch of `step` are back with the bank: it is to be leased again. An event of
    the schedule."""

    step: int


def to_return(
    batch: TrainBatch, measured: Mapping[str, Mismatch], return_kl: float
) -> tuple[GroupBack, ...]:
    """Groups of the batch above `return_kl`, the worst first. `measured`: by trajectory id."""
    if not return_kl or not batch.returns_left:
        return ()
    worst: dict[str, float] = {}
    for item in batch.trajectories:
        found = measured.get(item.id)
        if found is not None and found.tokens:
            worst[item.group] = max(worst.get(item.group, 0.0), found.k3)
    above = [GroupBack(group, REASON, kl) for group, kl in worst.items() if kl > return_kl]
    return tuple(sorted(above, key=lambda back: (-back.measured_kl, back.group)))


def compared(
    batch: TrainBatch, measured: Mapping[str, Mismatch]
) -> tuple[float | None, float | None]:
    """Mean of the bank's bounds and mean of what was measured (k3), over the trajectories that have
    both; None where there are none."""
    both = [
        (kl, measured[id_].k3)
        for id_, kl in sorted(batch.predicted_kl.items())
        if id_ in measured and measured[id_].tokens
    ]
    if not both:
        return None, None
    return sum(b for b, _ in both) / len(both), sum(m for _, m in both) / len(both)


def to_keep(former: Sequence[FrozenBatch], fresh: Sequence[FrozenBatch]) -> tuple[FrozenBatch, ...]:
    """Batches that a checkpoint keeps, to bring them to a bank that lost records: those since the
    checkpoint before (`fresh`) and, for REVISED_MAX steps, all from one on of which groups went
    back: its record may have been lost while that of its first revision was not."""
    newest = max((batch.step for batch in fresh), default=0)
    revised = [b.step for b in former if b.revision and b.step > newest - REVISED_MAX]
    kept = [b for b in former if revised and b.step >= min(revised)]
    return (*kept, *fresh)
