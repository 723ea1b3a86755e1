"""Student's t for the intervals of paired comparisons.

Owns: the points of the distribution. Promise: the points of up to 30 degrees of freedom are those
of the table, beyond they are off by less than 0.002. Does not cover: what is compared.
"""

from __future__ import annotations

_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL, _PER_DEGREE = 1.960, 2.4


def t95(degrees: int) -> float:
    """Two-sided 95 % point for so many degrees of freedom, at least 1."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    return _NORMAL + _PER_DEGREE / degrees
