"""How many boxes should stand ready, of which kind: worked out from who asked of late. Pure.

Owns: the times of recent requests and starts. Promise: what is wanted of a kind is what is likely
to be asked for while one box is made, and at least the siblings of a group that began and of which
not all have asked yet; of what nobody asked for within `_WINDOW_S` nothing is wanted. All tables
are bounded. Does not cover: how many may be (pool.py).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from muster.types import EpisodeKey, Limits, Value

_WINDOW_S = 10.0
_TIMES_MAX = 256  # requests remembered of a kind
_KINDS_MAX = 128
_GROUPS_MAX = 256
_RUNS_MAX = 256
_SHARE = 0.3  # of the newest start in the mean


class Kind(Value, frozen=True):
    """What makes two fresh boxes alike: what is in them, and what they may use.

    content: names the state after set-up (content.py). set_up: whether a snapshot is needed for it,
    else boxes start from the bare base.
    """

    content: str
    limits: Limits
    set_up: bool = True


class _Recent:
    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=_TIMES_MAX)
        self.make_s = 0.0


class _Group:
    def __init__(self, kind: Kind):
        self.kind, self.siblings, self.last = kind, set[int](), 0.0


class Demand:
    """See the module."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, _Recent] = OrderedDict()
        self._groups: OrderedDict[tuple[str, str], _Group] = OrderedDict()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # siblings of a group, by run

    def asked(self, kind: Kind, key: EpisodeKey, now: float) -> None:
        """A caller asked for a box of the kind."""
        self._recent(kind).times.append(now)
        group = self._groups.setdefault((key.run, key.group), _Group(kind))
        group.siblings.add(key.sibling)
        group.last = now
        self._sizes[key.run] = max(self._sizes.get(key.run, 1), key.sibling + 1)
        self._groups.move_to_end((key.run, key.group))
        self._sizes.move_to_end(key.run)
        for table, most in ((self._groups, _GROUPS_MAX), (self._sizes, _RUNS_MAX)):
            while len(table) > most:
                table.popitem(last=False)

    def made(self, kind: Kind, took_s: float) -> None:
        """A box of the kind was made in so long, from its snapshot or the bare base."""
        recent = self._recent(kind)
        share = _SHARE if recent.make_s else 1.0
        recent.make_s += share * (took_s - recent.make_s)

    def wanted(self, now: float) -> dict[Kind, int]:
        """Boxes that should stand ready by kind, the kind asked for last first."""
        siblings = self._siblings_to_come(now)
        found: dict[Kind, int] = {}
        for kind, recent in reversed(self._kinds.items()):
            while recent.times and now - recent.times[0] > _WINDOW_S:
                recent.times.popleft()
            if recent.times:
                meanwhile = math.ceil(len(recent.times) / _WINDOW_S * recent.make_s)
                found[kind] = max(meanwhile, siblings.get(kind, 0))
        return {kind: count for kind, count in found.items() if count}

    def _siblings_to_come(self, now: float) -> dict[Kind, int]:
        found: dict[Kind, int] = {}
        for (run, _), group in self._groups.items():
            missing = self._sizes.get(run, 1) - len(group.siblings)
            if now - group.last <= _WINDOW_S and missing > 0:
                found[group.kind] = found.get(group.kind, 0) + missing
        return found

    def _recent(self, kind: Kind) -> _Recent:
        recent = self._kinds.setdefault(kind, _Recent())
        self._kinds.move_to_end(kind)
        while len(self._kinds) > _KINDS_MAX:
            self._kinds.popitem(last=False)
        return recent
