"""The newest owner epoch of each run that was heard of here. Pure.

Promise: a run's epoch never goes back while the run has boxes; at most `runs_max` others are
remembered. Does not cover: what a new owner means for boxes and callers (pool.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from muster.errors import Fenced
from muster.types import Value

_RUNS_MAX = 256


class Owner(Value, frozen=True):
    """The newest owner of a run, and when it spoke first."""

    epoch: int
    since: float


class Owners:
    """See the module."""

    def __init__(self, runs_max: int = _RUNS_MAX):
        self._runs_max = runs_max
        self._newest: OrderedDict[str, Owner] = OrderedDict()

    def of(self, run: str) -> Owner | None:
        return self._newest.get(run)

    def hear(self, run: str, epoch: int, now: float, busy: Collection[str]) -> Owner | None:
        """An owner speaks; the one whom it replaces, or None when nothing is new but the run.

        busy: runs that have boxes; they are not forgotten. See `is_news` first.
        """
        former = self._newest.get(run)
        self._newest[run] = Owner(epoch, now)
        self._newest.move_to_end(run)
        for old in list(self._newest)[:-1]:
            if len(self._newest) > self._runs_max and old not in busy:
                del self._newest[old]
        return former

    def is_news(self, run: str, epoch: int) -> bool:
        """Whether nobody with this epoch or a newer one has spoken for the run."""
        known = self._newest.get(run)
        return known is None or epoch > known.epoch

    def fence(self, run: str, epoch: int) -> Fenced | None:
        """Why an owner is refused, or None."""
        known = self._newest.get(run)
        return None if known is None or epoch >= known.epoch else fenced(known.epoch)


def fenced(newest: int) -> Fenced:
    """The error of a former owner."""
    return Fenced(
        f"owner epoch {newest} of this run has spoken",
        field="owner_epoch",
        way_out="a newer router owns the run: stop",
    )
