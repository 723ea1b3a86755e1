"""Which sibling is launched next.

Owns: the places that wait for a launch. Promise: pure; attempts that a former router left come
first (their boxes live for a while only), then repairs (their group waits for them alone), then
new siblings, interleaved: all first ones of a block of groups, all second ones …; blocks follow by
rank, in whatever order groups came, so none is passed over. Nothing scans what waits. Does not
cover: whether there is room (seats.py), how an attempt begins (launching.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator

Place = tuple[str, int]
"""(group, sibling)"""
Rank = tuple[int, int]
"""Lower ones are launched first: (number of the job, index of the group in it)."""
Skip = Callable[[Place], bool]


class LaunchOrder:
    """`interleave`: groups of a block."""

    def __init__(self, interleave: int):
        self._interleave = interleave
        self._resumes: deque[Place] = deque()
        self._repairs: deque[Place] = deque()
        self._fresh: dict[str, deque[int]] = {}  # siblings that were never launched
        self._ranks: dict[str, Rank] = {}  # of those groups
        self._line: list[tuple[Rank, str]] = []  # of the same, sorted
        self._block: dict[str, int] = {}  # group → how many of it were launched from this block
        self._joined = 0  # groups that this block has had

    def resume(self, place: Place) -> None:
        """An attempt that a former router left."""
        self._resumes.append(place)

    def repair(self, place: Place) -> None:
        """Another attempt of a sibling."""
        self._repairs.append(place)

    def fresh(self, place: Place, rank: Rank) -> None:
        """A sibling's first attempt; the rank is its group's."""
        group, number = place
        if group not in self._fresh:
            self._fresh[group], self._ranks[group] = deque(), rank
            insort(self._line, (rank, group))
        self._fresh[group].append(number)

    @property
    def resuming(self) -> int:
        """Attempts that a former router left and that wait."""
        return len(self._resumes)

    def drop(self, group: str) -> None:
        """Nothing of it is launched any more."""
        self._resumes = deque(p for p in self._resumes if p[0] != group)
        self._repairs = deque(p for p in self._repairs if p[0] != group)
        self._forget(group)

    def _forget(self, group: str) -> None:
        """None of its siblings waits for a first attempt any more."""
        if self._fresh.pop(group, None) is not None:
            del self._line[bisect_left(self._line, (self._ranks.pop(group), group))]
        self._block.pop(group, None)

    def next(self, skip: Skip) -> Place | None:
        """The first that `skip` does not pass over; None when there is none. It stays here."""
        for places in (self._resumes, self._repairs):
            for place in places:
                if not skip(place):
                    return place
        found = self._of_block(skip)
        if found is None and self._refill(skip):
            found = self._of_block(skip)
        return found

    def next_resume(self, skip: Skip) -> Place | None:
        """The same of the attempts that a former router left alone."""
        return next((place for place in self._resumes if not skip(place)), None)

    def launched(self, place: Place) -> None:
        """It waits no more."""
        group, number = place
        for places in (self._resumes, self._repairs):
            if place in places:
                places.remove(place)
                return
        left = self._fresh[group]
        left.remove(number)
        if group in self._block:
            self._block[group] += 1
        if not left:
            self._forget(group)

    def _of_block(self, skip: Skip) -> Place | None:
        """Of the open block, the sibling of the group that is furthest behind."""
        if self._block and self._joined < min(self._interleave, len(self._fresh)):
            self._join(skip)
        best: Place | None = None
        least = 0
        for group, count in self._block.items():
            place = (group, self._fresh[group][0])
            if (best is None or count < least) and not skip(place):
                best, least = place, count
        return best

    def _join(self, skip: Skip) -> None:
        """Let groups that came since into a block that had room for more."""
        for _, group in self._line:
            if self._joined >= self._interleave:
                return
            if group not in self._block and not skip((group, self._fresh[group][0])):
                self._block[group] = 0
                self._joined += 1

    def _refill(self, skip: Skip) -> bool:
        """Begin a block with the next groups."""
        self._block, self._joined = {}, 0
        self._join(skip)
        return bool(self._block)

    def __iter__(self) -> Iterator[Place]:
        yield from self._resumes
        yield from self._repairs
        for _, group in self._line:
            yield from ((group, number) for number in self._fresh[group])

    def __len__(self) -> int:
        fresh = sum(len(numbers) for numbers in self._fresh.values())
        return len(self._resumes) + len(self._repairs) + fresh

    def __bool__(self) -> bool:
        return bool(self._resumes or self._repairs or self._fresh)
