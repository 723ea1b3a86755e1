"""How far two policies lie apart, on tokens that were sampled.

Owns: engine-trainer mismatch, effective sample size, the drift of one step. All figures are means
per token in float64; log-ratios are clamped to ±20 before exp. Promise: what is measured is raw
(before any truncation). Does not cover: what to do about it (loss.py, the bank).

μ: probability that the engine recorded; π_p: the trainer's own under the same weights; ρ = π_p/μ.
Sources: joschu.net/blog/kl-approx.html (k1, k3); Kong 1992 (effective sample size);
fengyao.notion.site/off-policy-rl (token truncation).
"""

from __future__ import annotations

from torch import Tensor

from services.trainer.figures import Mismatch

LOG_RATIO_MAX = 20.0
"""exp(20) ≈ 5e8 already says "no overlap"; more would overflow sums."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(numerator/denominator) from log-probabilities, shape kept, clamped to ±20."""
    return (numerator - denominator).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def mismatch(behaviour: Tensor, proximal: Tensor, *, tis_cap: float) -> Mismatch:
    """Compare log-probabilities, shape [n] each, of the same sampled tokens."""
    if behaviour.numel() == 0:
        return Mismatch()
    mu, pi = behaviour.double(), proximal.double()
    delta = log_ratio(pi, mu)
    ratio = delta.exp()
    return Mismatch(
        tokens=delta.numel(),
        k1=float(-delta.mean()),
        k3=float((ratio - 1.0 - delta).mean()),
        max_abs=float((pi - mu).abs().max()),
        ess_fraction=float(ratio.sum().square() / (ratio.numel() * ratio.square().sum())),
        truncated_share=float((ratio > tis_cap).double().mean()),
    )


def step_kl(before: Tensor, after: Tensor, behaviour: Tensor, *, tis_cap: float) -> float:
    """Mean KL(v ‖ v+1) per token, estimated on tokens sampled by μ; shapes [n].

    k3 form with x ~ v: mean of r − 1 − log r, r = π_{v+1}/π_v. As the tokens come from μ, each
    counts with min(π_v/μ, C), self-normalised; on-policy all weights are 1.
    """
    if before.numel() == 0:
        return 0.0
    old, new, mu = before.double(), after.double(), behaviour.double()
    delta = log_ratio(new, old)
    weights = log_ratio(old, mu).exp().clamp(max=tis_cap)
    return float((weights * (delta.exp() - 1.0 - delta)).sum() / weights.sum())
