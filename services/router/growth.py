"""How large conversations become: the room that a young one is given at launch.

Owns: the running mean of the contexts at which conversations ended. Promise: pure; between half of
nothing and `most`; before the first end `most` itself, so that an unknown workload is launched with
care; what ended long ago counts less and less. Does not cover: who is launched (seats.py).

Half of the mean: among conversations of all ages one has grown about half way. The first that end
are the short ones, so `most` stands for the first `_ASSUMED` conversations beside what is seen.
"""

from __future__ import annotations

_ASSUMED = 64  # conversations, of twice `most` each
_REMEMBERED = 512  # conversations that the mean goes back
_SHARE = 0.5
_STEP = 1 / 16  # smaller changes are not worth a recount


class Growth:
    """`tokens`: the room now. `most`: its bound, tokens."""

    def __init__(self, most: int):
        self._most = self.tokens = most
        self._mean = most / _SHARE
        self._ended = _ASSUMED

    def ended(self, context: int) -> bool:
        """A conversation ended at so many tokens; True when `tokens` is another number now."""
        self._ended = min(self._ended + 1, _REMEMBERED)
        self._mean += (context - self._mean) / self._ended
        tokens = min(self._most, int(_SHARE * self._mean))
        if abs(tokens - self.tokens) <= _STEP * self.tokens:
            return False
        self.tokens = tokens
        return True
