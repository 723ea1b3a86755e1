"""How far the newest policy lies from the one that sampled a token, as a bound.

Owns: what each step of the lineage moved the policy by, as the trainer measured and published it.
Promise: pure; memory is that of the versions which the lineage remembers; a step that was not
measured is never taken for none: it is counted, and what it belongs to is no bound. Does not cover:
what to do about it (drift.py), which versions there are (lineage.py).

KL is per token, in nats. With S(v) = Σ √KL(u's parent ‖ u) over the versions u after v up to the
newest one, the drift of a token that v sampled is bounded by S(v)². Near a policy KL is half the
squared Fisher-Rao distance, √KL is thus a length up to a constant, and lengths of steps add up at
most (the triangle inequality): equality for steps in one direction; for steps at right angles the
drift is Σ KL, so with n equal ones the bound is n times too high. This holds to second order, for
small steps. A trajectory's bound is the mean over its sampled tokens,

    (Σ over spans: tokens × S(v)²) ÷ tokens,

v being the oldest version that the span's tokens attended to (`kv_min_version`, which is the
version itself unless KV was kept): never less than what that of the sampling version alone says.
With every token taken for one of the first version (from which the lag is counted) it would be
higher. What was measured, KL m against version w, goes on from there: (√m + S(w))².
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from muster.types import Value
from services.readybank.lineage import Lineage

_LOG_MAX = 20.0
Run = tuple[int, int]
"""So many sampled tokens, one after the other, over KV of this version: (version, tokens)."""


class Drift(Value, frozen=True):
    """`kl`: over the steps that were measured; `missing`: how many were not. Without any it is a
    bound."""

    kl: float
    missing: int = 0

    @property
    def bound(self) -> float | None:
        """None when a step on the way was not measured."""
        return None if self.missing else self.kl


class Ledger:
    """Of one run; to be told of every version after the lineage was."""

    def __init__(self, lineage: Lineage):
        self._lineage = lineage
        self._moved: dict[int, float] = {}  # version → √KL(parent ‖ version)
        self._since: dict[int, tuple[float, int]] = {}  # version → S(version), steps without figure
        self._newest = -1  # those hold for this one

    def see(self, version: int, step_kl: float | None) -> None:
        """The first figure of a version stands; a negative one counts as 0 (an estimate may be)."""
        self._newest = -1
        if step_kl is not None and math.isfinite(step_kl):
            self._moved.setdefault(version, math.sqrt(max(0.0, step_kl)))

    def drift(self, runs: Iterable[Run], first: int | None = None) -> Drift:
        """Of a trajectory's sampled tokens, or of the first so many. 0 when it has none."""
        total, tokens, missing = 0.0, 0, 0
        for version, count in runs:
            count = count if first is None else min(count, first - tokens)
            if count <= 0:
                continue
            way, lacks = self._way(version)
            total, tokens, missing = total + count * way * way, tokens + count, max(missing, lacks)
        return Drift(total / tokens if tokens else 0.0, missing)

    def onward(self, version: int, kl: float) -> Drift:
        """What was measured against `version`, taken on to the newest one."""
        way, missing = self._way(version)
        return Drift((math.sqrt(max(0.0, kl)) + way) ** 2, missing)

    def forget(self, below: int) -> None:
        """As the lineage does: versions under `below` are not asked for again."""
        below = min(below, self._lineage.newest)
        self._moved = {v: moved for v, moved in self._moved.items() if v >= below}
        self._newest = -1

    def _way(self, version: int) -> tuple[float, int]:
        """S(version), and the steps on the way that were not measured. A version that is not
        remembered lies behind a step of which nothing is known."""
        if self._newest != self._lineage.newest:
            self._newest, way, missing = self._lineage.newest, 0.0, 0
            self._since = {}
            for passed in self._lineage.line():
                self._since[passed] = (way, missing)
                moved = self._moved.get(passed)
                way, missing = way + (moved or 0.0), missing + (moved is None)
        known = self._since.get(version)
        return known if known is not None else (0.0, 1)


def divergence(behaviour: Iterable[float], now: Iterable[float]) -> float:
    """KL(μ‖π) per token, from log-probabilities of tokens that μ sampled: mean of ρ − 1 − log ρ,
    ρ = π/μ, log ρ clamped to ±20 (k3, joschu.net/blog/kl-approx.html; as the trainer's). 0 of no
    tokens."""
    logs = [max(-_LOG_MAX, min(_LOG_MAX, q - p)) for p, q in zip(behaviour, now, strict=True)]
    return math.fsum(math.expm1(log) - log for log in logs) / len(logs) if logs else 0.0
