"""When the figures of a step say that something is wrong.

Owns: limits, and the sentences that tell when they are passed. Promise: pure; each alarm names the
figure, its limit and where to look. Does not cover: who hears it (driver.py).
"""

from __future__ import annotations

import math

from muster.errors import Refused
from muster.types import Value
from services.trainer.config import TrainerConfig
from services.trainer.figures import Mismatch, MismatchBucket, StepFigures

ON_POLICY_TOKENS = 64
"""Sampled tokens under the trainer's own weights that suffice to compare it with the engine."""
FLAT_TOKENS = 256
"""Tokens of one lag that suffice to say whether the mismatch grows with lag."""
FLAT_RATIO = 2.0
"""Frozen weights: k3 of any lag may be so many times that of lag 0."""


class AlarmLimits(Value, frozen=True):
    """Meanings in config.py (`alarm_…`); 0 switches one off."""

    k3: float = 0.02
    ess_token: float = 0.5
    ess_turn: float = 0.1
    truncated: float = 0.05
    step_kl: float = 0.05
    frozen: bool = False  # weights do not move, so lag must not matter


def limits_of(config: TrainerConfig) -> AlarmLimits:
    """The part of the configuration that alarms need."""
    return AlarmLimits(
        k3=config.alarm_k3,
        ess_token=config.alarm_ess_token,
        ess_turn=config.alarm_ess_turn,
        truncated=config.alarm_truncated,
        step_kl=config.alarm_step_kl,
        frozen=config.frozen,
    )


def alarms(figures: StepFigures, limits: AlarmLimits) -> tuple[str, ...]:
    """What is beyond its limit, one sentence each; empty when all is well."""
    found = figures.mismatch
    told = []
    if limits.k3 and found.k3 > limits.k3:
        told.append(
            f"mismatch k3 {found.k3:.4g} per token is above {limits.k3:g}: {_where(figures)}"
        )
    if found.ess_fraction < limits.ess_token:
        told.append(
            f"effective share of tokens {found.ess_fraction:.3g} is below {limits.ess_token:g}: "
            "few tokens carry the gradient; lower router.lag_max"
        )
    if found.ess_turn < limits.ess_turn:
        told.append(
            f"effective share of turns {found.ess_turn:.3g} is below {limits.ess_turn:g}: "
            "replies are no longer this policy's; lower router.lag_max"
        )
    if limits.truncated and found.truncated_share > limits.truncated:
        told.append(
            f"the correction cuts {found.truncated_share:.1%} of tokens, above "
            f"{limits.truncated:.1%}: {_where(figures)}"
        )
    if limits.step_kl and figures.step_kl > limits.step_kl:
        told.append(
            f"the step moved the policy by {figures.step_kl:.4g} per token, above "
            f"{limits.step_kl:g}: lower trainer.lr"
        )
    return (*told, *(_grown(figures.buckets) if limits.frozen else ()))


def check_on_policy(found: Mismatch, mean_abs_max: float) -> bool:
    """Trainer and engine under the same weights: whether there was enough to compare.

    Raises Refused when the mean |Δ log-probability| is above the bound: the ratio of policies that
    are one and the same is then not 1, and every weight in the loss is wrong.
    """
    if found.tokens < ON_POLICY_TOKENS:
        return False
    if not found.mean_abs <= mean_abs_max:
        raise Refused(
            f"engine and trainer disagree on {found.tokens} tokens that both scored under the same "
            f"weights: mean |Δ log-probability| {found.mean_abs:.3g}, above {mean_abs_max:g}",
            field="trainer.on_policy_max",
            value=mean_abs_max,
            way_out="compare type, quantisation, temperature and head of both sides; raise the "
            "bound only for an engine that is quantised on purpose",
        )
    return True


def _where(figures: StepFigures) -> str:
    """Whether numerics or age is to blame, from the buckets."""
    fresh = k3_of(figures.buckets, lag=0)
    if math.isnan(fresh):
        return "no token is of the current version; lower router.lag_max"
    if fresh > figures.mismatch.k3 / 2:
        return (
            f"{fresh:.4g} at lag 0, so numerics: compare type, quantisation and head of both sides"
        )
    return f"{fresh:.4g} at lag 0, so age: lower router.lag_max or trainer.lr"


def k3_of(buckets: tuple[MismatchBucket, ...], lag: int) -> float:
    """Mean k3 per token of one lag over all positions; NaN without tokens."""
    chosen = [bucket.found for bucket in buckets if bucket.lag_versions == lag]
    tokens = sum(found.tokens for found in chosen)
    return math.fsum(f.k3 * f.tokens for f in chosen) / tokens if tokens else math.nan


def _grown(buckets: tuple[MismatchBucket, ...]) -> tuple[str, ...]:
    tokens: dict[int, int] = {}
    for bucket in buckets:
        lag = bucket.lag_versions
        tokens[lag] = tokens.get(lag, 0) + bucket.found.tokens
    if tokens.get(0, 0) < FLAT_TOKENS:
        return ()
    fresh = k3_of(buckets, 0)
    return tuple(
        f"weights are frozen, but k3 is {k3_of(buckets, lag):.4g} at lag {lag} and {fresh:.4g} at "
        "lag 0: tokens carry the wrong version, or replicas serve other weights than they say"
        for lag, count in sorted(tokens.items())
        if lag and count >= FLAT_TOKENS and k3_of(buckets, lag) > FLAT_RATIO * fresh
    )
