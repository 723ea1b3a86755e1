"""The figures of an optimizer step.

Owns: what a policy measured (`StepFigures`) and what is told of a step (`StepReport`). Promise: all
divergences are per token, in float64, finite; no torch here, so that the schedule and the
simulation need none. Does not cover: how they are computed (divergence.py, loss.py).
"""

from __future__ import annotations

from muster.types import Value


class Mismatch(Value, frozen=True):
    """Engine against trainer over `tokens` sampled tokens (all zero when there are none).

    k1: mean of −log ρ, an unbiased estimate of KL(μ‖π_p) that may fall below 0.
    k3: mean of ρ − 1 − log ρ, the same with less variance, never below 0.
    mean_abs, max_abs: mean and largest |log π_p − log μ|.
    ratio_p01, ratio_p999: ρ at the 0.1th and the 99.9th percentile.
    ess_fraction: (Σρ)² / (n Σρ²) on raw token weights; 1 when the policies agree.
    ess_turn: the same over the turns (runs of sampled tokens), each with the product of its ρ.
    truncated_share: share of tokens whose ρ the correction cuts or masks.
    """

    tokens: int = 0
    k1: float = 0.0
    k3: float = 0.0
    max_abs: float = 0.0
    ess_fraction: float = 1.0
    truncated_share: float = 0.0
    mean_abs: float = 0.0
    ratio_p01: float = 1.0
    ratio_p999: float = 1.0
    ess_turn: float = 1.0


class MismatchBucket(Value, frozen=True):
    """The mismatch of tokens that were sampled `lag_versions` ago (the last bucket: or longer) at
    positions [position_from, position_to) of their context. A turn across a bound counts in each
    bucket with the tokens that it has there."""

    lag_versions: int
    position_from: int
    position_to: int
    found: Mismatch


class StepFigures(Value, frozen=True):
    """What training measured. `per_trajectory` is keyed by trajectory id; `buckets` split the same
    tokens as `mismatch` by lag and position.

    step_kl: estimate of the per-token KL(v‖v+1) on `step_kl_tokens` sampled tokens of the batch, in
    micro-batches drawn at random (the seed is the step). Groups without contrast are drawn first:
    their tokens, `step_kl_tokens_aside` of them, were held aside from the loss. The others are
    in-sample, where a step moves most, so with few tokens aside the figure is rather too high than
    too low. It says nothing about contexts unlike the batch's.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    step_kl: float = 0.0
    step_kl_tokens: int = 0
    step_kl_tokens_aside: int = 0
    clipped_share: float = 0.0
    mismatch: Mismatch = Mismatch()
    per_trajectory: dict[str, Mismatch] = {}
    buckets: tuple[MismatchBucket, ...] = ()


class StepReport(Value, frozen=True):
    """The figures of one step that go into its version record (all of them in the checkpoint).

    The training took `train_s` and ended at `ended_unix_s`."""

    step: int
    figures: StepFigures
    tokens: int
    trajectories: int
    groups_with_variance: int
    groups: int
    excluded: int  # siblings that were infrastructure failures or unknown
    lag_mean_versions: float
    train_s: float = 0.0
    ended_unix_s: float = 0.0
    groups_returned: int = 0  # before the step, by whichever incarnation
    predicted_kl: float | None = None  # mean of the bank's bounds, over the trajectories with one
    measured_kl: float | None = None  # mean of k3 over the same
