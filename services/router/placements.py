"""Which replica serves a turn: the policies by name.

Owns: which policy a name stands for; the interface's words are known under this module. Promise:
as the policies': pure, the same for the same calls. Does not cover: whether a turn may start at
all (seats.py, admission.py).
"""

from __future__ import annotations

from collections.abc import Callable

from services.router.placements_finish import PredictedFinish as PredictedFinish
from services.router.placements_published import CacheAware as CacheAware
from services.router.placements_published import ConsistentHash as ConsistentHash
from services.router.placements_published import LeastLoaded as LeastLoaded
from services.router.placements_published import OverlapCost as OverlapCost
from services.router.placements_published import RoundRobin as RoundRobin
from services.router.placements_published import StickyLeastLoaded as StickyLeastLoaded
from services.router.placements_view import Choice as Choice
from services.router.placements_view import Placement as Placement
from services.router.placements_view import ReplicaView as ReplicaView
from services.router.placements_view import TurnRequest as TurnRequest
from services.router.prefix import Mark as Mark
from services.router.rules import RouterRules

_POLICIES: dict[str, Callable[[RouterRules], Placement]] = {
    "round_robin": lambda _: RoundRobin(),
    "least_loaded": lambda _: LeastLoaded(),
    "consistent_hash": lambda _: ConsistentHash(),
    "cache_aware": lambda _: CacheAware(),
    "sticky_least_loaded": lambda rules: StickyLeastLoaded(rules.move_margin, rules.move_ratio),
    "overlap_cost": lambda _: OverlapCost(),
    "predicted_finish": PredictedFinish.of,
}

NAMES = tuple(sorted(_POLICIES))


def placement_of(rules: RouterRules) -> Placement:
    """The policy that `rules.placement` names. KeyError for another name: config.py refuses it."""
    return _POLICIES[rules.placement](rules)
