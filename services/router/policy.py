"""Which replica serves a turn: sticky, least loaded.

Owns: the choice and its reasons. Promise: pure; a conversation stays where its KV is until its
home is busier than the idlest replica by `margin` and by `ratio`; ties go to the id, so equal
states give equal choices. Does not cover: whether a turn may start at all (admission.py).
Source of margin and ratio: research on vllm-project/router `sticky_table` (8, 2x).
"""

from __future__ import annotations

from muster.types import Value


class ReplicaView(Value, frozen=True):
    """A replica as the router sees it."""

    id: str
    in_flight: int
    sessions: int
    suspect: bool = False  # failed a call lately


class PlacementRequest(Value, frozen=True):
    """The turn to place. `home` is where the conversation's KV lies, empty at first."""

    episode: str
    home: str
    context_tokens: int


class Choice(Value, frozen=True):
    """A replica, and why; `replica` is empty when none can serve."""

    replica: str
    reason: str
    terms: dict[str, int]  # in-flight requests per candidate


class Placement:
    """Interface of placement policies; this one is sticky least-loaded."""

    def __init__(self, margin: int = 8, ratio: float = 2.0):
        self._margin, self._ratio = margin, ratio

    def choose(self, request: PlacementRequest, fleet: tuple[ReplicaView, ...]) -> Choice:
        """Pick a replica for one turn."""
        healthy = [r for r in fleet if not r.suspect] or list(fleet)
        terms = {r.id: r.in_flight for r in healthy}
        if not healthy:
            return Choice("", "no_replica", terms)
        idlest = min(healthy, key=lambda r: (r.in_flight, r.sessions, r.id))
        home = next((r for r in healthy if r.id == request.home), None)
        if home is None:
            return Choice(idlest.id, "rehomed" if request.home else "least_loaded", terms)
        gap = home.in_flight - idlest.in_flight
        if gap >= self._margin and home.in_flight >= self._ratio * max(idlest.in_flight, 1):
            return Choice(idlest.id, "moved", terms)
        return Choice(home.id, "sticky", terms)
