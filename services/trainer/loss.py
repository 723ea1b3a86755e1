"""The decoupled, clipped policy loss with importance weights.

Owns: the loss of sampled tokens. Promise: the correction for the engine's own numerics or older
weights (μ → π_p) carries no gradient and is applied once; the clip bounds only this step's own move
(π_p → π_θ). Does not cover: advantages (advantage.py), the forward pass (adapters).

L = −(1/N) Σ_t w_t · min(r_t A_t, clip(r_t, 1−ε_lo, 1+ε_hi) A_t)
r_t = π_θ / π_p,   ρ_t = exp(clamp(log π_p − log μ, ±20)),   w_t = stopgrad f(ρ_t):

tis   f(ρ) = min(ρ, C)            token TIS, fengyao.notion.site/off-policy-rl, C = 2
mis   f(ρ) = ρ · 1[α ≤ ρ ≤ β]     masked IS (IcePop, 2510.18855)
none  f(ρ) = 1                    the engine's part is ignored: biased, to compare with

Bypass puts μ in the place of π_p, so r_t = π_θ / μ and ρ_t = 1: the clip bounds both moves at once
and w_t is 1. To multiply by f(π_p/μ) as well would count the engine's part twice.

Every token is measured against the μ of the version that sampled it, so an episode over several
versions needs nothing more. N is the number of sampled tokens with credit in the whole batch (a
token mean, as in DAPO, 2503.14476): no micro-batch split and no trajectory length changes a token's
weight, and groups without contrast neither push nor dilute. Decoupled PPO: 2110.00641.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from muster.types import Value
from services.trainer.divergence import log_ratio

Correction = Literal["tis", "mis", "none"]
"""What f is; see the module."""


class LossSettings(Value, frozen=True):
    """Clip range of r; f, its cap C and its bounds α and β; whether μ stands for π_p."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    correction: Correction = "tis"
    tis_cap: float = 2.0
    mis_low: float = 0.5
    mis_high: float = 5.0
    bypass: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        """ρ that f leaves alone, [low, high]; what is cut by `none` is told by the cap C."""
        return (self.mis_low, self.mis_high) if self.correction == "mis" else (0.0, self.tis_cap)


class LossParts(Value, frozen=True):
    """`total`: scalar tensor to differentiate. The rest counts tokens, for the metrics."""

    total: Tensor
    tokens: int
    clipped: int  # tokens whose clip took the gradient away
    truncated: int  # tokens whose weight f made smaller


def policy_loss(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    tokens_total: int,
    settings: LossSettings,
) -> LossParts:
    """Loss of one micro-batch: its sum over `tokens_total`, so that the sums of all add up.

    All tensors have shape [n], one entry per sampled token; log-probabilities as they were sampled
    (temperature, top-p and top-k applied). Only `current` is differentiated.
    """
    anchor = (behaviour if settings.bypass else proximal).detach()
    raw = log_ratio(anchor, behaviour).exp().detach()
    weight = importance(raw, settings)
    ratio = log_ratio(current, anchor).exp()
    bounded = ratio.clamp(1.0 - settings.eps_low, 1.0 + settings.eps_high)
    free, held = ratio * advantages, bounded * advantages
    objective = weight * torch.minimum(free, held)
    return LossParts(
        total=-objective.sum() / tokens_total,
        tokens=current.numel(),
        clipped=int((held < free).sum()),
        truncated=int((weight < raw).sum()) if settings.correction != "none" else 0,
    )


def importance(ratio: Tensor, settings: LossSettings) -> Tensor:
    """f(ρ), shape kept."""
    if settings.correction == "none":
        return torch.ones_like(ratio)
    if settings.correction == "tis":
        return ratio.clamp(max=settings.tis_cap)
    inside = (ratio >= settings.mis_low) & (ratio <= settings.mis_high)
    return torch.where(inside, ratio, 0.0)
