"""Pass rates of tasks: a beta distribution reached through a normal rank.

Owns: from a task's standard-normal rank to its pass rate and to the threshold that gives it.
Promise: pure; quantiles right within 0.002. Does not cover: who draws (workload.py).
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from statistics import NormalDist

_NORMAL = NormalDist()
_CELLS = 4096


class PassRates:
    """Beta(alpha, beta) by quantile, alpha ≤ 1: tabled once per shape."""

    def __init__(self, alpha: float, beta: float):
        self._power = 1.0 / alpha
        self._cdf = _table(alpha, beta)

    def rate(self, rank: float) -> float:
        """The pass rate of a task whose standard-normal rank is `rank`."""
        return self._quantile(_NORMAL.cdf(rank))

    def threshold(self, rank: float) -> float:
        """A standard normal lies below it with the pass rate's probability."""
        return _NORMAL.inv_cdf(min(max(self.rate(rank), 1e-9), 1 - 1e-9))

    def _quantile(self, share: float) -> float:
        cell = min(max(bisect_left(self._cdf, share), 1), _CELLS)
        low, high = self._cdf[cell - 1], self._cdf[cell]
        inside = (share - low) / (high - low) if high > low else 0.0
        return float(((cell - 1 + min(max(inside, 0.0), 1.0)) / _CELLS) ** self._power)


@lru_cache(maxsize=16)
def _table(alpha: float, beta: float) -> list[float]:
    """The distribution at x = (i / cells)^(1 / alpha); that grid takes the pole at 0 away."""
    total, sums = 0.0, [0.0]
    for cell in range(_CELLS):
        x = ((cell + 0.5) / _CELLS) ** (1.0 / alpha)
        total += (1.0 - x) ** (beta - 1.0)
        sums.append(total)
    return [value / total for value in sums]
