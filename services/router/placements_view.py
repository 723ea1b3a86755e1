"""What a placement policy sees and says.

Owns: the views of replicas, the turn to place, the choice, the interface of policies. Promise:
plain data. Does not cover: the policies (placements_published.py, placements_finish.py), where the
figures come from (fleet.py).
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from muster.types import Value
from services.router.prefix import Mark

Fleet: TypeAlias = tuple["ReplicaView", ...]


class ReplicaView(Value, frozen=True):
    """A replica as the router sees it, for one request."""

    id: str
    in_flight: int
    sessions: int
    suspect: bool = False  # failed a call lately, or is not well
    slow: float = 1.0  # its times, as a ratio to the fleet's median
    credit_tokens: int = 0  # of KV that may be filled; 0: unknown
    load_tokens: int = 0  # contexts of the conversations at home there
    running_tokens: int = 0  # contexts of the requests in flight
    queued_tokens: int = 0  # uncached tokens sent and not answered
    cached_tokens: int = 0  # of this request's context
    group_sessions: int = 0  # siblings at home there
    distance_s: float = 0.0  # of one turn: the call to it and the answer back


class TurnRequest(Value, frozen=True):
    """The turn to place. `home` is where the conversation's KV lies, empty at first."""

    episode: str
    group: str
    home: str
    context_tokens: int
    expected_tokens: int = 0  # sampled, about
    marks: tuple[Mark, ...] = ()


class Choice(Value, frozen=True):
    """A replica, and why; `replica` is empty when none can serve."""

    replica: str
    reason: str
    terms: dict[str, float]


class Placement(Protocol):
    """A placement policy."""

    def choose(self, request: TurnRequest, fleet: Fleet) -> Choice:
        """Pick a replica for one turn."""
        ...


def willing(fleet: Fleet) -> Fleet:
    """Those that may be chosen: all that are well, or all."""
    return tuple(r for r in fleet if not r.suspect) or fleet


def none() -> Choice:
    """The choice from an empty fleet."""
    return Choice("", "no_replica", {})
