"""What the bank's events and commands carry: rules, batches, fates, leased groups.

Owns: the carriers only. Promise: plain data, as in events.py, which hands them on.
"""

from __future__ import annotations

from typing import ClassVar

from muster.types import Fate, OutcomeLabel, SamplingParams, Value


class BankRules(Value, frozen=True):
    """The machine's whole configuration.

    `journal_format` grows when commands get other fields: older journals are refused then.
    """

    journal_format: ClassVar[int] = 2  # 2: revisions of batches, drifts

    valid_min: int = 2  # valid siblings that make a group worth training on
    repairs_max: int = 2  # an invalid label of attempt >= this is final, as for the router
    zero_variance: str = "train"  # or "filter": what becomes of groups without contrast
    version_wait_s: float = 30.0  # how long a group is held for a version not yet announced
    unacknowledged_max: int = 64  # batches that one trainer may hold without acknowledging
    stall_s: float = 60.0  # a lease that saw no progress so long is told of
    fairness_batches: int = 2  # see batch.py; 0 turns it off
    retire_at_once: int = 64  # groups that one RetireGroups names at most
    returns_max: int = 4  # how often groups of one batch may be given back
    # Drift, KL per token (drift.py); kl_refuse 0: no group is refused for it, none is scored
    kl_sure: float = 0.02
    kl_refuse: float = 0.0
    calibrate_share: float = 0.02  # of the groups refused unmeasured, those scored all the same
    score_wait_s: float = 10.0  # how long a group waits for its score
    score_siblings: int = 2  # trajectories scored for one group
    score_tokens: int = 4096  # of one trajectory's beginning
    scores_max: int = 3  # scores of one group, as versions go on


class BatchMember(Value, frozen=True):
    """A group in a batch, and the attempt that counts for each sibling, in sibling order."""

    group: str
    attempts: tuple[int, ...]


class Batch(Value, frozen=True):
    """The frozen composition of one step; its id is (run, step)."""

    step: int
    members: tuple[BatchMember, ...]
    asked_unix_s: float
    complete_unix_s: float  # when the last of its groups became complete
    trainer_epoch: int
    policy_version: int  # newest published when it was frozen
    revision: int = 0  # how often groups of it were given back
    returned: tuple[str, ...] = ()  # all that were
    groups: int = 0  # that it is to have; 0: as many as it has

    @property
    def lacks(self) -> int:
        """Groups to be put in the place of those that were given back."""
        return max(0, self.groups - len(self.members))


class FateRecord(Value, frozen=True):
    """The end of a group. `step` is 0 when it is in no batch."""

    group: str
    fate: Fate
    step: int = 0
    reason: str = ""
    predicted_kl: float | None = None  # these three: see GroupFate in events.proto
    scored_kl: float | None = None
    measured_kl: float | None = None


class GivenBack(Value, frozen=True):
    """A group that the trainer does not want. `measured_kl`: of its worst trajectory, per token."""

    group: str
    reason: str
    measured_kl: float | None = None


class ToScore(Value, frozen=True):
    """A trajectory of which the beginning is to be scored; keys of its turns in order."""

    sibling: int
    attempt: int
    payload_keys: tuple[str, ...]


class Score(Value, frozen=True):
    """`kl`: KL per token (k3), behaviour policy against `version`, over the first `tokens` sampled
    tokens of a trajectory."""

    sibling: int
    attempt: int
    version: int
    tokens: int
    kl: float


class LeasedSibling(Value, frozen=True):
    """The attempt that counts; no payloads when its label is not valid."""

    sibling: int
    attempt: int
    label: OutcomeLabel
    payload_keys: tuple[str, ...]
    predicted_kl: float | None = None  # the bank's bound; None without one
    scored_kl: float | None = None  # as an idle replica measured it, if one did


class LeasedGroup(Value, frozen=True):
    """All siblings of a group, in order."""

    group: str
    task: str
    sampling: SamplingParams
    siblings: tuple[LeasedSibling, ...]


class GroupOver(Value, frozen=True):
    """What goes with a group, and what is added to its job's totals."""

    group: str
    job: str
    index: int
    totals: dict[str, int]
    keys: tuple[str, ...]  # of its payloads
