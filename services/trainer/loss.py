"""The decoupled, clipped policy loss with truncated importance weights.

Owns: the loss of sampled tokens. Promise: the correction for the engine's own numerics or older
weights (μ → π_p) carries no gradient and is applied once; the clip bounds only this step's own move
(π_p → π_θ). Does not cover: advantages (advantage.py), the forward pass (adapters).

L = −(1/N) Σ_t w_t · min(r_t A_t, clip(r_t, 1−ε_lo, 1+ε_hi) A_t)
w_t = stopgrad min(exp(clamp(log π_p − log μ, ±20)), C),   r_t = π_θ / π_p

Sources: decoupled PPO (2110.00641); token TIS (fengyao.notion.site/off-policy-rl), C = 2.
N is the number of sampled tokens with credit in the whole batch (a token mean, as in DAPO,
2503.14476): no micro-batch split and no trajectory length changes a token's weight, and groups
without contrast neither push nor dilute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muster.types import Value
from services.trainer.divergence import log_ratio


class LossSettings(Value, frozen=True):
    """Clip range of r and cap C of w."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    tis_cap: float = 2.0


class LossParts(Value, frozen=True):
    """`total`: scalar tensor to differentiate. The rest counts tokens, for the metrics."""

    total: Tensor
    tokens: int
    clipped: int  # tokens whose clip took the gradient away
    truncated: int  # tokens whose weight was cut to C


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

    All tensors have shape [n], one entry per sampled token; log-probabilities at the sampling
    temperature. Only `current` is differentiated.
    """
    anchor = proximal.detach()
    raw = log_ratio(anchor, behaviour).exp()
    weight = raw.clamp(max=settings.tis_cap).detach()
    ratio = log_ratio(current, anchor).exp()
    bounded = ratio.clamp(1.0 - settings.eps_low, 1.0 + settings.eps_high)
    free, held = ratio * advantages, bounded * advantages
    objective = weight * torch.minimum(free, held)
    return LossParts(
        total=-objective.sum() / tokens_total,
        tokens=current.numel(),
        clipped=int((held < free).sum()),
        truncated=int((raw > settings.tis_cap).sum()),
    )
