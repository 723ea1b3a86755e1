"""The only place that reads a clock. Shells call it; pure modules take `now` as an argument.

`wall()` is for records that people and other processes read; `monotonic()` is for waits and
is never compared across processes. Neither decides safety: epochs do.
"""

from __future__ import annotations

import time


def wall() -> float:
    """Seconds since the Unix epoch."""
    return time.time()  # noqa: TID251 - this is the one reader


def monotonic() -> float:
    """Seconds on this process's steady clock."""
    return time.monotonic()
