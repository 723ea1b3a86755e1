"""A leased batch.

Owns: `FrozenBatch`, `TrainBatch`, `Trajectory`. Does not cover: its episodes as token sequences
(layout.py).
"""

from __future__ import annotations

from muster.types import OutcomeLabel, SamplingParams, Segment, Value


class Trajectory(Value, frozen=True):
    """The record of the attempt that counts for one sibling."""

    group: str
    task: str
    sibling: int
    attempt: int
    label: OutcomeLabel
    segments: tuple[Segment, ...]
    sampling: SamplingParams

    @property
    def id(self) -> str:
        """`group.sibling.attempt`, unique within the run."""
        return f"{self.group}.{self.sibling}.{self.attempt}"


class BatchMember(Value, frozen=True):
    """A group, and the attempt that counts for each sibling, in sibling order."""

    group: str
    attempts: tuple[int, ...]


class FrozenBatch(Value, frozen=True):
    """The bank's record of a step, as it was leased. A checkpoint keeps that of its own step and
    brings it back to a bank that has lost it."""

    step: int
    members: tuple[BatchMember, ...]
    asked_unix_s: float = 0.0
    complete_unix_s: float = 0.0
    trainer_epoch: int = 0
    policy_version: int = 0
    revision: int = 0  # how often groups of it were given back
    returned: tuple[str, ...] = ()  # all that were
    groups: int = 0  # as the bank's record has it


class GroupBack(Value, frozen=True):
    """A group that is given back, why, and what was measured on its worst trajectory (KL per
    token)."""

    group: str
    reason: str
    measured_kl: float


class TrainBatch(Value, frozen=True):
    """The groups of one step, frozen by the bank."""

    frozen: FrozenBatch
    trajectories: tuple[Trajectory, ...]
    predicted_kl: dict[str, float] = {}  # by trajectory id, where the bank has a bound
    returns_left: int = 0  # how often groups of it may still be given back

    @property
    def step(self) -> int:
        """Which step it is for."""
        return self.frozen.step

    @property
    def groups(self) -> tuple[str, ...]:
        """Ids of its groups."""
        return tuple(member.group for member in self.frozen.members)
