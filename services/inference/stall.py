"""Whether an engine that has work still does any.

Owns: `Stall`. Promise: pure; a time without a single token counts only while something is to be
sampled and no update is in hand. Does not cover: what is to be done about it (__main__.py).
"""

from __future__ import annotations

from services.inference.engine import Load


class Stall:
    """Fed with the engine's figures now and then; says for how long nothing has come."""

    def __init__(self) -> None:
        self._tokens = -1
        self._since = 0.0

    def silent_s(self, load: Load, *, updating: bool, now: float) -> float:
        """Seconds since the last sign of progress; 0 while there is nothing to do."""
        idle = load.running + load.waiting == 0
        if idle or updating or load.tokens_generated != self._tokens:
            self._tokens, self._since = load.tokens_generated, now
        return now - self._since
