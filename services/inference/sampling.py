"""Checks of sampling parameters. Promise: pure; a transform that would be applied on one side only
is refused, so tokens trained are tokens sampled from the distribution whose log-probabilities they
carry."""

from __future__ import annotations

from muster.errors import InvalidInput
from muster.types import SamplingParams


def check_sampling(params: SamplingParams, mask_ids_max: int = 0) -> SamplingParams:
    """The same parameters, or InvalidInput. Temperature 0 has no distribution to learn from.

    mask_ids_max: largest top_k for which the engine tells what was left to choose from; 0: it does
    not. A choice of one needs no telling (probes ask for it, and nothing is learned from them).
    """
    rules = (
        ("temperature", params.temperature, 0.0 < params.temperature <= 10.0, "in (0, 10]"),
        ("top_p", params.top_p, 0.0 < params.top_p <= 1.0, "in (0, 1]; 1 turns it off"),
        ("top_k", params.top_k, params.top_k >= 0, "0 (off) or positive"),
        ("seed", params.seed, 0 <= params.seed < 1 << 64, "an unsigned 64-bit number"),
    )
    for field, value, fine, way_out in rules:
        if not fine:
            raise InvalidInput(
                "out of range", field=f"sampling.{field}", value=value, way_out=way_out
            )
    if is_filtered(params) and params.top_k != 1:
        _check_mask(params, mask_ids_max)
    return params


def is_filtered(params: SamplingParams) -> bool:
    """True when a token was chosen from fewer than all."""
    return params.top_p < 1.0 or params.top_k > 0


def _check_mask(params: SamplingParams, mask_ids_max: int) -> None:
    if mask_ids_max == 0:
        raise InvalidInput(
            "this replica does not tell what top-p and top-k left to choose from",
            field="sampling.top_k" if params.top_k else "sampling.top_p",
            value=params.top_k or params.top_p,
            way_out="sample with top_p = 1 and top_k = 0, or set inference.mask_ids_max on an "
            "engine that tells it",
        )
    if not 0 < params.top_k <= mask_ids_max:
        raise InvalidInput(
            "top_k bounds the ids that are sent back with each token",
            field="sampling.top_k",
            value=params.top_k,
            way_out=f"set it from 1 to {mask_ids_max} (inference.mask_ids_max), with top_p too",
        )
