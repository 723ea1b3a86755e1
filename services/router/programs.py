"""Conversations as they lie in the replicas' KV caches: where, how large, in which order.

Owns: programs (one per running attempt that still samples) and the sums per replica. Promise: pure;
every sum is kept as things change, none is computed anew; a program changes only between `take` and
`put`, so that sums and order always agree with it. Does not cover: who may go on (seats.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

Key = tuple[float, ...]


class State(StrEnum):
    """What a program does with its KV."""

    BOOT = "boot"  # its box is being started
    GEN = "gen"
    TOOL = "tool"
    HELD = "held"  # it could go on, and has no room


@dataclass(slots=True, eq=False)
class Program:
    """One conversation; `context` in tokens, `since` steady seconds in this state."""

    id: str
    group: str
    number: int  # order of launch
    group_number: int  # order of the first launch of its group
    context: int
    home: str
    state: State = State.BOOT
    since: float = 0.0
    aged: bool = False  # held for too long: before all others until its turn has ended
    kept: int = 0  # tokens that its last turn left in the cache of its home, as far as is known
    straight: bool = False  # it was neither held nor moved since
    wish: str = ""  # where its KV lay under a former router
    granted: bool = False  # held, then let on; its turn has not begun yet
    waited: bool = False  # it was held, since `since`, by a home that is lost
    key: Key = ()
    weighed: dict[str, float] = field(default_factory=dict)  # reserved, by replica, at launch
    hold: dict[str, float] = field(default_factory=dict)  # of its last hold, until its turn begins


class Row:
    """The programs at home on one replica. `reserve`: tokens that each counts for at launch."""

    def __init__(self, rank: Callable[[Program], Key], reserve: int):
        self._rank, self.reserve = rank, reserve
        self.ranked: list[tuple[Key, Program]] = []  # best first
        self.held: list[tuple[Key, Program]] = []  # best first
        self.tools: dict[str, Program] = {}  # by the start of their tool
        self.load = 0  # Σ contexts
        self.live = 0  # Σ contexts of those not held
        self.reserved = 0  # Σ max(context, reserve)
        self.closed_since: float | None = None  # it takes no turn

    def put(self, program: Program) -> None:
        """Count it."""
        program.key = self._rank(program)
        entry = (program.key, program)
        insort(self.ranked, entry)
        self.load += program.context
        self.reserved += max(program.context, self.reserve)
        if program.state is State.HELD:
            insort(self.held, entry)
        else:
            self.live += program.context
        if program.state is State.TOOL:
            self.tools[program.id] = program

    def take(self, program: Program) -> None:
        """Count it no more."""
        entry = (program.key, program)
        del self.ranked[bisect_left(self.ranked, entry)]
        self.load -= program.context
        self.reserved -= max(program.context, self.reserve)
        if program.state is State.HELD:
            del self.held[bisect_left(self.held, entry)]
        else:
            self.live -= program.context
        self.tools.pop(program.id, None)

    def reserves(self, tokens: int) -> None:
        """Each counts for so many tokens at launch from now on."""
        self.reserve = tokens
        self.reserved = sum(max(program.context, tokens) for _, program in self.ranked)

    def ranks(self, program: Program) -> None:
        """Give one that is not counted now its place in the order."""
        program.key = self._rank(program)

    def hold_terms(self, program: Program, kv: float, now: float) -> dict[str, float]:
        """Why one that is not counted now is held, for the record: `tokens` that it needs, `kv`
        that may be filled, `live` and `load` tokens of the others that are not held and of all, how
        many rank `before` it, `since` when (steady seconds)."""
        before = bisect_left(self.ranked, (program.key, program))
        tokens = {"tokens": program.context, "kv": kv, "live": self.live, "load": self.load}
        return {**tokens, "before": before, "since": now}

    def above(self, program: Program, most: float) -> int:
        """Σ contexts of those that outrank it; counted no further than above `most`."""
        total = 0
        for key, other in self.ranked:
            if key > program.key:
                break
            total += other.context
            if total > most:
                break
        return total
