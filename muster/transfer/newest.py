"""The versions that may still be asked for: the newest one, the one before it, the one being sent.

Owns: `Newest`. Promise: what is sent is the newest recorded version, and at most one later one is
made by then, so it is among the newest two; from then on it stays, however many are made while its
publication is tried again, until another one is asked for. The others are let go at once, as each
is as large as the weights. Does not cover: what a version is made of (snapshot.py).
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")
KEPT = 2


class Newest(Generic[T]):
    """By version. Kept from one thread and read from another: each call is one step for both."""

    def __init__(self) -> None:
        self._kept: dict[int, T] = {}
        self._sent: tuple[int, T] | None = None  # the one asked for last

    def forget_old(self, coming: int) -> None:
        """All but the one before `coming`, which is made now, perhaps again."""
        others = [(v, kept) for v, kept in self._kept.items() if v != coming]
        self._kept = dict(others[1 - KEPT :])

    def keep(self, version: int, what: T) -> None:
        """The newest one; its number may be any."""
        known = {v: kept for v, kept in self._kept.items() if v != version}
        self._kept = dict([*known.items(), (version, what)][-KEPT:])

    def of(self, version: int) -> T:
        """KeyError when it was let go: a bug of whoever asks."""
        sent = self._sent
        if version not in self._kept and sent is not None and sent[0] == version:
            return sent[1]
        found = self._kept[version]
        self._sent = (version, found)
        return found
