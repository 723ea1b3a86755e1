"""What each replica lets this run fill of its KV cache, and how far that is believed.

Owns: credits with their ends, the trust in them. Promise: pure; a credit that has ended counts as
none; trust falls when a cache that a conversation left was not found, and recovers slowly; another
life or another block size begins anew. Does not cover: who uses them (seats.py).
Source of the guard's figures: the study named in ranks.py; an engine that has 20 % less than it
says costs 129 % more time per batch without the guard, 0.8 % with it.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTFALL_TOKENS = 1000  # what is not found up to here is rounding
_LOSS = 0.25  # of a shortfall, taken from trust as a share of the credit
_GAIN_TOKENS = 75  # given back by each turn that found its cache
_TRUST_MIN = 0.4


@dataclass(slots=True)
class Credit:
    """Of one replica. `tokens` of KV until `until`, steady seconds."""

    tokens: int = 0
    until: float = 0.0
    trust: float = 1.0

    def told(self, tokens: int, until: float, *, anew: bool) -> None:
        """The replica granted again; `anew`: its cache is another one than before."""
        if anew:
            self.trust = 1.0
        self.tokens, self.until = max(tokens, 0), until

    def left(self, now: float) -> float:
        """Tokens that may be filled now, as far as they are believed."""
        return self.tokens * self.trust if now < self.until else 0.0

    def found(self, shortfall: int) -> None:
        """A turn ended: of what it had left in the cache, `shortfall` tokens were gone."""
        if self.tokens <= 0:
            return
        if shortfall > SHORTFALL_TOKENS:
            self.trust = max(_TRUST_MIN, self.trust - _LOSS * shortfall / self.tokens)
        else:
            self.trust = min(1.0, self.trust + _GAIN_TOKENS / self.tokens)
