"""What a scripted engine chose from, and which experts it says that it used.

Promise: pure; masks hold the sampled token and follow from it, routing follows from token and
position, so that whoever computes a token again tells the same. Does not cover: when they are asked
for (fake.py).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from muster.types import RoutedExperts, SamplingMask, SamplingParams
from services.inference.routing import laid_out
from services.inference.sampling import is_filtered

EXPERTS = 8  # of each layer


def mask_of(sampled: Sequence[int], params: SamplingParams, vocabulary: int) -> SamplingMask | None:
    """top_k ids for each token, itself the first; None when the request had no filter."""
    if not is_filtered(params):
        return None
    width = min(max(1, params.top_k), vocabulary)
    ids = [
        (token + step) % max(vocabulary, token + 1) for token in sampled for step in range(width)
    ]
    return SamplingMask((width,) * len(sampled), tuple(ids))


def routing_of(
    tokens: Sequence[int], start: int, layers: int, per_token: int
) -> RoutedExperts | None:
    """Of the tokens from `start` on; the last one was not computed. None without layers."""
    rows = [
        (token + 3 * at + 5 * layer + place) % EXPERTS
        for at, token in enumerate(tokens[start:-1], start)
        for layer in range(layers)
        for place in range(per_token)
    ]
    return laid_out(struct.pack(f"<{len(rows)}H", *rows), layers, per_token, len(tokens) - start)
