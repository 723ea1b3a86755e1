"""Settings of the ready bank, section `[readybank]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from muster.config import Config, Section
from services.readybank.events import BankRules


class ReadyBankConfig(Section):
    """Where it listens and which groups it lets through."""

    listen: str = "127.0.0.1:0"
    """host:port of its gRPC server; port 0 lets the system choose."""
    valid_min: int = Field(2, ge=1)
    """Valid siblings from which a group is trained on; groups with fewer are filtered."""
    zero_variance: Literal["train", "filter"] = "train"
    """What becomes of groups whose valid rewards are all equal: train or filter."""
    version_wait_s: float = Field(30.0, gt=0)
    """Seconds that a group is held for a policy version not yet announced; then it is filtered."""
    unacknowledged_max: int = Field(64, ge=1)
    """Batches that a trainer may hold without acknowledging one; it acknowledges at a checkpoint,
    so this is more than trainer.checkpoint_every."""
    fairness_batches: int = Field(2, ge=0, le=64)
    """A complete group that was opened before all groups of so many newest batches goes first;
    0: always the oldest complete one."""
    stall_s: float = Field(60.0, gt=0)
    """Seconds without progress after which a waiting lease is told of in the log."""
    tick_s: float = Field(1.0, gt=0)
    """Seconds between timer events."""
    redis_patience_s: float = Field(60.0, gt=0)
    """How long a read or write is repeated while Redis is away; then the bank stops."""


def rules(config: Config, section: ReadyBankConfig) -> BankRules:
    """What the machine needs of both; `repairs_max` is the whole run's, so that router and bank
    agree on which label is final."""
    return BankRules(
        valid_min=section.valid_min,
        repairs_max=config.repairs_max,
        zero_variance=section.zero_variance,
        version_wait_s=section.version_wait_s,
        unacknowledged_max=section.unacknowledged_max,
        stall_s=section.stall_s,
        fairness_batches=section.fairness_batches,
    )
