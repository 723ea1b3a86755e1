"""The bank's bounds on drift against what was measured, over a run.

Owns: which records say so. Promise: pure; of a step that was trained several times (after a return
to an older checkpoint) the newest counts. Does not cover: how a bound is made (the bank's ledger).
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from muster.figures import Drift
from muster.run_index import RunIndex
from muster.types import Fate

STALE, STALE_SCORED, RETURNED = "stale_kl", "stale_kl_scored", "returned_"


def drift(index: RunIndex) -> Drift:
    """See Drift."""
    steps = [made[-1].step for step in sorted(index.steps) if (made := index.made_by(step))]
    told = [(s.predicted_kl, s.measured_kl) for s in steps if s]
    filtered = [f for f in index.record.fates if f.fate is Fate.FILTERED]
    refused = [f for f in filtered if f.reason == STALE]
    calibrated = [f for f in refused if f.scored_kl is not None]
    return Drift(
        trained_predicted_kl=_mean(predicted for predicted, _ in told),
        trained_measured_kl=_mean(measured for _, measured in told),
        refused=len(refused),
        refused_scored=sum(f.reason == STALE_SCORED for f in filtered),
        returned=sum(f.reason.startswith(RETURNED) for f in filtered),
        calibrated=len(calibrated),
        calibrated_predicted_kl=_mean(f.predicted_kl for f in calibrated),
        calibrated_scored_kl=_mean(f.scored_kl for f in calibrated),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
