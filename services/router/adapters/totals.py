"""What the bank counted of a job's retired groups, as the router's machine hears it.

Owns: that mapping. Promise: pure; an outcome that this release does not know is counted under its
name. Does not cover: reading counts and bits of one moment (durable.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from services.router import events as e


def job_totals(job: str, totals: Mapping[str, int], bits: bytes) -> e.JobTotals:
    """Counts by name, and one bit per group index, highest bit of a byte first."""
    return e.JobTotals(
        job=job,
        trained=totals.get("trained", 0),
        filtered=totals.get("filtered", 0),
        evaluated=totals.get("evaluated", 0),
        episodes=totals.get("episodes", 0),
        turns=totals.get("turns", 0),
        repairs=totals.get("repairs", 0),
        outcomes={
            name.removeprefix("outcome:"): count
            for name, count in sorted(totals.items())
            if name.startswith("outcome:")
        },
        indexes_retired=tuple(
            8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte & (0x80 >> bit)
        ),
    )
