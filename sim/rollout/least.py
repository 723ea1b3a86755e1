"""Weighted least squares with coefficients that are not negative, for few columns.

Owns: the best of all choices of columns that are used at all (with six there are 63), so the
minimum is exact. Promise: pure; columns that are the same to within rounding are not used together.
Does not cover: what the columns are (fit_engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

_SINGULAR = 1e-9  # of a pivot, columns scaled to one
_BETTER = 1e-12


def least(
    columns: Sequence[Sequence[float]], wanted: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Coefficients c ≥ 0 of the least Σ weight (c · row - wanted)²; `columns` row by row."""
    moments, right = _normal(columns, wanted, weights)
    best, lowest = [0.0] * len(right), 0.0
    for count in range(1, len(right) + 1):
        for chosen in combinations(range(len(right)), count):
            part = [[moments[i][j] for j in chosen] for i in chosen]
            found = _linear(part, [right[i] for i in chosen])
            if found is None or min(found) < 0:
                continue
            # At a minimum the loss is a constant less Σ c · right.
            loss = -sum(c * right[i] for c, i in zip(found, chosen, strict=True))
            if loss < lowest - _BETTER * abs(lowest):
                lowest, best = loss, [0.0] * len(right)
                for i, value in zip(chosen, found, strict=True):
                    best[i] = value
    return best


def _normal(
    columns: Sequence[Sequence[float]], wanted: Sequence[float], weights: Sequence[float]
) -> tuple[list[list[float]], list[float]]:
    """Weighted products of the columns with each other, and with what is wanted."""
    width = len(columns[0]) if columns else 0
    moments = [[0.0] * width for _ in range(width)]
    right = [0.0] * width
    for row, y, weight in zip(columns, wanted, weights, strict=True):
        for i in range(width):
            part = weight * row[i]
            right[i] += part * y
            for j in range(width):
                moments[i][j] += part * row[j]
    return moments, right


def _linear(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss with pivots; None when it is singular to within rounding."""
    n = len(right)
    scale = [max(matrix[i][i], 0.0) ** 0.5 for i in range(n)]
    if min(scale) == 0.0:
        return None
    rows = [
        [matrix[i][j] / scale[i] / scale[j] for j in range(n)] + [right[i] / scale[i]]
        for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        if abs(rows[pivot][i]) < _SINGULAR:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for other in range(n):
            if other != i:
                factor = rows[other][i] / rows[i][i]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[i], strict=True)]
    return [rows[i][n] / rows[i][i] / scale[i] for i in range(n)]
