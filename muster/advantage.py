"""Group-relative credit.

Owns: the advantage of each episode. Promise: only valid siblings of a group enter its mean and
deviation, one reward per episode however many segments it has, and no credit without contrast.
Does not cover: how an advantage becomes a gradient (loss.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from muster.errors import InvalidInput
from muster.leased import Trajectory
from muster.types import Value

Estimator = Literal["grpo", "grpo_unscaled", "rloo"]
"""How rewards become advantages; formulas at `assign_credit`."""

STD_FLOOR = 1e-6
"""Added to the deviation (GRPO as in verl); keeps near-equal rewards finite."""


class GroupCredit(Value, frozen=True):
    """What one group says: which siblings counted, and how far their rewards lie apart."""

    group: str
    valid: int
    excluded: int  # infrastructure failures and unknown outcomes
    mean: float
    std: float

    @property
    def has_variance(self) -> bool:
        """True when the group gives a gradient."""
        return self.std > 0.0


class Credit(Value, frozen=True):
    """Advantage per (group, sibling) of every valid episode, and the groups behind them."""

    advantages: dict[tuple[str, int], float]
    groups: tuple[GroupCredit, ...]

    @property
    def groups_with_variance(self) -> int:
        """Groups that give a gradient."""
        return sum(group.has_variance for group in self.groups)


def assign_credit(trajectories: Iterable[Trajectory], estimator: Estimator = "grpo") -> Credit:
    """Compare the n valid siblings of each group, with their mean reward R̄.

    grpo: (R_i − R̄) / (s + 1e-6), s with n − 1 (2402.03300, with the sample deviation of verl).
    grpo_unscaled: R_i − R̄ (Dr. GRPO, 2503.20783), so easy and hard tasks weigh alike.
    rloo: R_i − mean of the others = n/(n − 1) · (R_i − R̄) (2402.14740).

    A group with fewer than two valid siblings, or with equal rewards, gives zero to each: nothing
    can be compared in it. Raises InvalidInput when two records of one episode disagree.
    """
    rewards: dict[str, dict[int, float | None]] = {}
    for item in trajectories:
        siblings = rewards.setdefault(item.group, {})
        reward = reward_of(item)
        if item.sibling in siblings and siblings[item.sibling] != reward:
            raise InvalidInput(
                f"two records of one episode carry different rewards: {siblings[item.sibling]}",
                field=f"{item.group}.{item.sibling}.reward",
                value=reward,
                way_out="lease one attempt per sibling",
            )
        siblings[item.sibling] = reward
    advantages: dict[tuple[str, int], float] = {}
    groups = []
    for group, siblings in rewards.items():
        credit = _group_credit(group, siblings)
        groups.append(credit)
        for sibling, value in siblings.items():
            if value is not None:
                advantages[group, sibling] = _advantage(value, credit, estimator)
    return Credit(advantages, tuple(groups))


def reward_of(item: Trajectory) -> float | None:
    """The reward that counts; None when the outcome may not enter statistics.

    A failure of the model that left no verdict (its context ran over, say) counts as 0.
    """
    if not item.label.outcome.valid:
        return None
    reward = 0.0 if item.label.reward is None else item.label.reward
    if not math.isfinite(reward):
        raise InvalidInput(
            "a reward must be a finite number",
            field=f"{item.group}.{item.sibling}.reward",
            value=reward,
            way_out="correct the task's verifier; such a verdict is no reward",
        )
    return reward


def _advantage(reward: float, credit: GroupCredit, estimator: Estimator) -> float:
    if not credit.has_variance:
        return 0.0
    gain = reward - credit.mean
    if estimator == "rloo":
        return gain * credit.valid / (credit.valid - 1)
    return gain / (credit.std + STD_FLOOR) if estimator == "grpo" else gain


def _group_credit(group: str, siblings: dict[int, float | None]) -> GroupCredit:
    valid = [reward for reward in siblings.values() if reward is not None]
    mean = math.fsum(valid) / len(valid) if valid else 0.0
    std = 0.0
    # Equality is tested on the rewards: a rounded mean would leave a deviation of 1e-17.
    if len(valid) > 1 and len(set(valid)) > 1:
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in valid) / (len(valid) - 1))
    return GroupCredit(group, len(valid), len(siblings) - len(valid), mean, std)
