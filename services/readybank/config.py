"""Settings of the ready bank, section `[readybank]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from muster.config import Config, Section
from muster.errors import ConfigError
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
    returns_max: int = Field(4, ge=0, le=64)
    """How often the trainer may give groups of one batch back; 0: never."""
    kl_refuse: float = Field(0.0, ge=0)
    """Bound on a trajectory's drift, KL per token, above which its group is filtered unmeasured;
    0: no group is filtered or scored for its drift. About kl_sure times the lag."""
    kl_sure: float = Field(0.02, ge=0)
    """Drift up to which a group is admitted unmeasured; above it, and up to kl_refuse, an idle
    replica scores it, and it is filtered when that says more than this."""
    score_wait_s: float = Field(10.0, gt=0, le=600)
    """How long a group waits for an idle replica to score it; then it is admitted unmeasured."""
    score_tokens: int = Field(4096, ge=2, le=1 << 20)
    """Tokens at the beginning of a trajectory that are scored."""
    score_siblings: int = Field(2, ge=1, le=64)
    """Trajectories of a group that are scored: those thought to have drifted most."""
    calibrate_share: float = Field(0.02, ge=0, le=1)
    """Of the groups above kl_refuse, the share that is scored before it is filtered all the same:
    tells what the bound is worth."""
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
        returns_max=section.returns_max,
        kl_sure=section.kl_sure,
        kl_refuse=section.kl_refuse,
        calibrate_share=section.calibrate_share,
        score_wait_s=section.score_wait_s,
        score_siblings=section.score_siblings,
        score_tokens=section.score_tokens,
    )


def check(section: ReadyBankConfig) -> None:
    """What holds between settings. Raises ConfigError."""
    if 0 < section.kl_refuse < section.kl_sure:
        raise ConfigError(
            "what is admitted unmeasured cannot be filtered unmeasured",
            field="readybank.kl_refuse",
            value=section.kl_refuse,
            way_out=f"set it to readybank.kl_sure = {section.kl_sure:g} or more, or to 0 (never)",
        )
