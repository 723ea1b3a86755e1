"""What runs where: requests in flight, homes of conversations, prefixes in caches.

Owns: the counts per replica, who is at home where, the prefix index. Promise: pure; counts change
with each request and each reply, nothing is counted anew per turn; a replica that left takes its
counts along. Does not cover: who is chosen (placements.py), who may go on (seats.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from services.router.events import Generated
from services.router.placements import Mark, ReplicaView, TurnRequest
from services.router.prefix import PrefixIndex
from services.router.rules import RouterRules

_TRIPS = 16  # calls, one a second, by which the way to a replica is known


@dataclass(slots=True)
class Load:
    """Of one listed replica. Tokens."""

    life: str = ""
    block_size: int = 0
    version: int = -1  # of its weights, as last heard
    in_flight: int = 0
    sessions: int = 0
    running_tokens: int = 0
    queued_tokens: int = 0
    load_tokens: int = 0
    credit_tokens: int = 0
    distance_s: float = 0.0  # of a call to it and back, its machine's queues left out
    _trips: deque[float] = field(default_factory=lambda: deque(maxlen=_TRIPS))

    def trip(self, seconds: float) -> None:
        """A short call to it took so long; 0: unknown.

        The shortest of the last ones is the way: all else is waiting, which comes and goes. Parts
        of a millisecond are not told apart, so that replicas of one machine stay equal.
        """
        if seconds > 0:
            self._trips.append(seconds)
            self.distance_s = int(min(self._trips) * 1000) / 1000

    def elsewhere(self) -> None:
        """Another process has its name, maybe on another machine."""
        self._trips.clear()
        self.distance_s = 0.0


@dataclass(slots=True)
class Asked:
    """A request in flight: `uncached` tokens were thought to need prefill."""

    replica: str
    context: int
    uncached: int
    marks: tuple[Mark, ...]
    salt: int


@dataclass(slots=True)
class _Home:
    replica: str
    group: str
    context: int


class Loads:
    """Of all listed replicas."""

    def __init__(self, rules: RouterRules):
        self._index = PrefixIndex(rules.prefix_block_tokens, rules.prefix_entries_max)
        self._block_tokens = rules.prefix_block_tokens
        self.loads: dict[str, Load] = {}  # by id, in order
        self.asked: dict[str, Asked] = {}  # episode → its request in flight
        self.homes: dict[str, _Home] = {}
        self._siblings: dict[tuple[str, str], int] = {}  # (group, replica) → at home there
        self.version = 0  # the newest published

    def listed(self, replicas: Set[str]) -> None:
        """Take the announced replicas."""
        for gone in self.loads.keys() - replicas:
            self.lost(gone)
            self._index.forget(gone)
        self.loads = {r: self.loads.get(r) or Load() for r in sorted(replicas)}

    def lost(self, replica: str) -> None:
        """Nothing runs there any more, nobody is at home there, its cache is gone."""
        for episode in [e for e, home in self.homes.items() if home.replica == replica]:
            self.session_over(episode)
        for episode in [e for e, asked in self.asked.items() if asked.replica == replica]:
            self.ended(episode)
        self._index.clear(replica)

    def told(self, replica: str, life: str, block_size: int, version: int) -> tuple[bool, bool]:
        """It said who it is: whether its cache is another one, whether it is an empty one."""
        load = self.loads.get(replica)
        if load is None:
            return False, False
        anew = bool(load.life) and (load.life, load.block_size) != (life, block_size)
        load.life, load.block_size = life, block_size
        cold = self.serves(replica, version) or anew
        if anew:
            load.version = version
            load.elsewhere()
            self._index.clear(replica)
        return anew, cold

    def serves(self, replica: str, version: int) -> bool:
        """Its weights are of this version; True when they are newer than it had, and so its cache
        is empty."""
        load = self.loads.get(replica)
        if load is None or version <= load.version:
            return False
        known, load.version = load.version >= 0, version
        if known:
            self._index.clear(replica)
        return known

    def published(self, version: int) -> list[str]:
        """The replicas whose caches that empties."""
        if version <= self.version:
            return []
        self.version = version
        cold = [r for r, load in self.loads.items() if load.version < version]
        for replica in cold:
            self._index.clear(replica)
        return cold

    # -- requests ----------------------------------------------------------------------

    def cached(self, replica: str, marks: tuple[Mark, ...]) -> int:
        """Tokens thought to be in its cache."""
        return self._index.cached(replica, self.version, marks)

    def sent(self, request: TurnRequest, replica: str, kept: int = 0) -> int:
        """A request goes there; answers the tokens that are thought to be cached. `kept`: left
        there under a former router; the index knows nothing of it."""
        load, marks = self.loads[replica], request.marks
        known = self.homes.get(request.episode)
        fresh = known is None or known.replica != replica
        indexed = self._index.cached(replica, self.version, marks)
        cached = min(indexed or kept, request.context_tokens)
        # What an earlier turn wrote is there already: only the end is new.
        self._index.dispatched(replica, self.version, marks if fresh else marks[-2:])
        uncached = request.context_tokens - cached
        load.in_flight += 1
        load.running_tokens += request.context_tokens
        load.queued_tokens += uncached
        self.asked[request.episode] = Asked(
            replica, request.context_tokens, uncached, marks, self.version
        )
        if known is None or fresh:
            self._settles(request.episode, _Home(replica, request.group, request.context_tokens))
        else:
            load.load_tokens += request.context_tokens - known.context
            known.context = request.context_tokens
        return cached

    def ended(self, episode: str) -> Asked | None:
        """Its request is over, well or badly."""
        asked = self.asked.pop(episode, None)
        load = self.loads.get(asked.replica) if asked is not None else None
        if asked is not None and load is not None:
            load.in_flight -= 1
            load.running_tokens -= asked.context
            load.queued_tokens -= asked.uncached
        return asked

    def replied(self, asked: Asked, event: Generated) -> None:
        """The index learns what the engine found, and where the reply ends."""
        thought = asked.context - asked.uncached
        marks: tuple[Mark, ...] = ()
        if asked.salt != self.version:
            if event.version != self.version:
                return  # a cache of former weights
            marks = asked.marks  # prefilled again under the weights that came while it ran
        elif thought - event.cached_tokens > self._block_tokens:
            rested = tuple(mark for mark in asked.marks if mark[1] <= thought)
            self._index.corrected(asked.replica, asked.salt, rested, event.cached_tokens)
        if event.boundary_tokens:
            mark = (event.boundary, event.boundary_tokens)
            self._index.dispatched(asked.replica, self.version, (*marks, mark))

    # -- homes -------------------------------------------------------------------------

    def _settles(self, episode: str, home: _Home) -> None:
        self.session_over(episode)
        self.homes[episode] = home
        load = self.loads[home.replica]
        load.sessions += 1
        load.load_tokens += home.context
        key = (home.group, home.replica)
        self._siblings[key] = self._siblings.get(key, 0) + 1

    def session_over(self, episode: str) -> None:
        """Explicit end of a conversation: nothing waits for a time-out."""
        home = self.homes.pop(episode, None)
        if home is None:
            return
        load = self.loads.get(home.replica)
        if load is not None:
            load.sessions -= 1
            load.load_tokens -= home.context
        key = (home.group, home.replica)
        left = self._siblings[key] - 1
        if left:
            self._siblings[key] = left
        else:
            del self._siblings[key]

    # -- views -------------------------------------------------------------------------

    def views(
        self,
        request: TurnRequest,
        suspect: Callable[[str], bool],
        slow: Callable[[str], float],
        kept: int = 0,
    ) -> tuple[ReplicaView, ...]:
        """All listed replicas as this request sees them. `kept`: as in `sent`, at its home."""
        return tuple(
            ReplicaView(
                id=replica,
                in_flight=load.in_flight,
                sessions=load.sessions,
                suspect=suspect(replica),
                slow=slow(replica),
                credit_tokens=load.credit_tokens,
                load_tokens=load.load_tokens,
                running_tokens=load.running_tokens,
                queued_tokens=load.queued_tokens,
                cached_tokens=self.cached(replica, request.marks)
                or (kept if replica == request.home else 0),
                group_sessions=self._siblings.get((request.group, replica), 0),
                distance_s=load.distance_s,
            )
            for replica, load in self.loads.items()
        )
