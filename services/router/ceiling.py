"""When too many attempts fail by infrastructure: stop launching, say why, try again later.

Owns: the recent ends of one job's attempts, the pause. Promise: pure; a job whose share of
infrastructure failures among its last attempts is above its ceiling launches nothing for `pause_s`,
then tries again with a clean slate, so that an outage neither burns through every repair nor fills
batches with what is left over. Does not cover: repairs (machine.py), the rules (muster.outcome).
"""

from __future__ import annotations

from collections import Counter, deque

from muster.types import Outcome, OutcomeLabel

_SHOWN = 300  # characters of what failed last


class InfraCeiling:
    """Of one job. `share`: 0..1, the ceiling; `window`: attempts that it is measured over."""

    def __init__(self, share: float, window: int, pause_s: float):
        self._share, self._pause_s = share, pause_s
        self._recent: deque[str] = deque(maxlen=max(window, 2))  # cause, "" for a valid end
        self._until = 0.0
        self._why = ""

    def ended(self, label: OutcomeLabel, now: float) -> None:
        """An attempt of the job ended."""
        infra = label.outcome is Outcome.INFRA_FAILURE
        self._recent.append((label.cause or "infra") if infra else "")
        if len(self._recent) < (self._recent.maxlen or 0) or self.paused(now):
            return
        causes = Counter(cause for cause in self._recent if cause)
        failed = causes.total()
        if failed > self._share * len(self._recent):
            told = ", ".join(f"{cause} {count}" for cause, count in causes.most_common(3))
            newest = f"; the newest: {label.detail[:_SHOWN]}" if infra and label.detail else ""
            self._why = (
                f"{failed} of the last {len(self._recent)} attempts failed by infrastructure "
                f"({told}), above infra_ceiling = {self._share:g}{newest}"
            )
            self._until = now + self._pause_s
            self._recent.clear()

    def paused(self, now: float) -> bool:
        """True while nothing may be launched."""
        return now < self._until

    def why(self, now: float) -> str:
        """For people; empty when not paused."""
        if not self.paused(now):
            return ""
        return f"paused: {self._why}; tries again in {self._until - now:.0f} s"
