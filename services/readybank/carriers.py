"""What the bank's events and commands carry: rules, batches, fates, leased groups.

Owns: the carriers only. Promise: plain data, as in events.py, which hands them on.
"""

from __future__ import annotations

from muster.types import Fate, OutcomeLabel, SamplingParams, Value


class BankRules(Value, frozen=True):
    """The machine's whole configuration."""

    valid_min: int = 2  # valid siblings that make a group worth training on
    repairs_max: int = 2  # an invalid label of attempt >= this is final, as for the router
    zero_variance: str = "train"  # or "filter": what becomes of groups without contrast
    version_wait_s: float = 30.0  # how long a group is held for a version not yet announced
    unacknowledged_max: int = 64  # batches that one trainer may hold without acknowledging
    stall_s: float = 60.0  # a lease that saw no progress so long is told of
    fairness_batches: int = 2  # see batch.py; 0 turns it off
    retire_at_once: int = 64  # groups that one RetireGroups names at most


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


class FateRecord(Value, frozen=True):
    """The end of a group. `step` is 0 when it is in no batch."""

    group: str
    fate: Fate
    step: int = 0
    reason: str = ""


class LeasedSibling(Value, frozen=True):
    """The attempt that counts; no payloads when its label is not valid."""

    sibling: int
    attempt: int
    label: OutcomeLabel
    payload_keys: tuple[str, ...]


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
