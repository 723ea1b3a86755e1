"""Routing as an engine tells it, laid out for every token.

Promise: pure; what the engine did not tell is UNRECORDED, never somebody else's row. Does not
cover: how an engine knows it (adapters/).
"""

from __future__ import annotations

from muster.segment_codec import UNRECORDED
from muster.types import RoutedExperts


def laid_out(rows: bytes, layers: int, per_token: int, tokens: int) -> RoutedExperts | None:
    """rows: uint16, [n ≤ tokens, layers, per_token], from the first token on.

    The last sampled token was not computed, so it has none; more rows than tokens: None.
    """
    row = 2 * layers * per_token
    told = len(rows) // row if row else 0
    if not row or told > tokens or told == 0:
        return None
    missing = UNRECORDED * ((tokens - told) * layers * per_token)
    return RoutedExperts(layers, per_token, rows + missing)
