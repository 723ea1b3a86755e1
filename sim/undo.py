"""What the store has written within its last second, so that a power cut can take it back.

Owns: the undoing of writes to dicts, sets and lists, newest first. Promise: whatever a write did
(set, deleted, counted, trimmed) is undone with it, and a write is undone whole or not at all, as
the end of an append-only file is lost. Every write goes through here: one that does not would stay
while what it rests on goes. Does not cover: which writes there are (streams.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from sim.world import World

T = TypeVar("T")
WINDOW_S = 1.0  # `appendfsync everysec`
_NOTHING: Any = object()


class Undo:
    """Of one store."""

    def __init__(self, world: World):
        self._world = world
        self._done: deque[tuple[float, Callable[[], None]]] = deque()

    def note(self, undo: Callable[[], None]) -> None:
        """How to take back what was just written."""
        now = self._world.now
        self._done.append((now, undo))
        while self._done and self._done[0][0] < now - WINDOW_S:
            self._done.popleft()

    def settle(self) -> None:
        """All that was written is on disk, as after WAITAOF."""
        self._done.clear()

    def take_back(self, lost_s: float) -> None:
        """What was written within the last `lost_s` (at most 1 s) was never written."""
        since = self._world.now - min(lost_s, WINDOW_S)
        while self._done and self._done[-1][0] >= since:
            self._done.pop()[1]()
        self._done.clear()

    def put(self, of: MutableMapping[str, T], key: str, value: T) -> None:
        """Set one key."""
        before = of.get(key, _NOTHING)
        of[key] = value
        self.note(lambda: _restore(of, key, before))

    def pop(self, of: MutableMapping[str, T], key: str) -> None:
        """Delete one key, if it is there."""
        if key in of:
            before = of.pop(key)
            self.note(lambda: _restore(of, key, before))

    def within(self, of: MutableMapping[str, T], key: str, make: Callable[[], T]) -> T:
        """The hash, set or list of that name, made if it is not there."""
        if key not in of:
            self.put(of, key, make())
        return of[key]


def _restore(of: MutableMapping[str, T], key: str, before: T) -> None:
    if before is _NOTHING:
        of.pop(key, None)
    else:
        of[key] = before
