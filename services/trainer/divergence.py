"""How far two policies lie apart, on tokens that were sampled.

Owns: engine-trainer mismatch, effective sample size, the drift of one step. All figures are means
per token in float64; log-ratios are clamped to ±20 before exp. Promise: what is measured is raw
(before any truncation). Does not cover: what to do about it (loss.py, the bank).

μ: probability that the engine recorded; π_p: the trainer's own under the same weights; ρ = π_p/μ.
Sources: joschu.net/blog/kl-approx.html (k1, k3); Kong 1992 (effective sample size);
fengyao.notion.site/off-policy-rl (token truncation).
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.figures import Mismatch

LOG_RATIO_MAX = 20.0
"""exp(20) ≈ 5e8 already says "no overlap"; more would overflow sums."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(numerator/denominator) from log-probabilities, shape kept, clamped to ±20."""
    return (numerator - denominator).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def mismatch(
    behaviour: Tensor,
    proximal: Tensor,
    *,
    bounds: tuple[float, float],
    turns: Tensor | None = None,
) -> Mismatch:
    """Compare log-probabilities, shape [n] each, of the same sampled tokens.

    `bounds`: ρ that the correction leaves alone. `turns`: which turn each token is of, any number
    that equals that of its turn's other tokens; without it each token is a turn of its own.
    """
    if behaviour.numel() == 0:
        return Mismatch()
    mu, pi = behaviour.double(), proximal.double()
    delta, far = log_ratio(pi, mu), (pi - mu).abs()
    ratio = delta.exp()
    lowest, highest = _percentiles(ratio, 0.001, 0.999)
    return Mismatch(
        tokens=delta.numel(),
        k1=float(-delta.mean()),
        k3=float((ratio - 1.0 - delta).mean()),
        max_abs=float(far.max()),
        ess_fraction=effective_share(ratio),
        truncated_share=float(((ratio < bounds[0]) | (ratio > bounds[1])).double().mean()),
        mean_abs=float(far.mean()),
        ratio_p01=lowest,
        ratio_p999=highest,
        ess_turn=effective_share(ratio if turns is None else _turn_ratios(delta, turns)),
    )


def effective_share(weights: Tensor) -> float:
    """(Σw)² / (n Σw²), shape [n]: the share of samples that would do as well unweighted."""
    return float(weights.sum().square() / (weights.numel() * weights.square().sum()))


def _turn_ratios(delta: Tensor, turns: Tensor) -> Tensor:
    """The product of ρ over each turn, its logarithm clamped to ±20."""
    _, place = turns.unique(return_inverse=True)
    sums = torch.zeros(int(place.max()) + 1, dtype=delta.dtype).index_add_(0, place, delta)
    return sums.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _percentiles(values: Tensor, *shares: float) -> list[float]:
    """Linear between the two nearest; by sorting, as torch.quantile takes 2^24 values at most."""
    ordered = values.sort().values
    places = [share * (len(ordered) - 1) for share in shares]
    nearest = [(int(place), min(int(place) + 1, len(ordered) - 1)) for place in places]
    return [
        float(ordered[low].lerp(ordered[high], place - low))
        for place, (low, high) in zip(places, nearest, strict=True)
    ]


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
