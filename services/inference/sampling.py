"""Checks of sampling parameters. Promise: pure; a transform that would be applied on one side only
is refused, so tokens trained are tokens sampled from the distribution whose log-probabilities they
carry."""

from __future__ import annotations

from muster.errors import InvalidInput
from muster.types import SamplingParams


def check_sampling(params: SamplingParams) -> SamplingParams:
    """The same parameters, or InvalidInput. Temperature 0 has no distribution to learn from."""
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
    return params
