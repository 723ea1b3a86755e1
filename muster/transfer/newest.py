"""The versions that may still be asked for: the newest one, and the one before it.

Owns: `Newest`. Promise: while a version is being sent the next one may be made, and a third only
after that is recorded, so two are enough for every publication and resend; the others are let go at
once, as each is as large as the weights. Does not cover: what a version is made of (snapshot.py).
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")
KEPT = 2


class Newest(Generic[T]):
    """By version. Kept from one thread and read from another: each call is one step for both."""

    def __init__(self) -> None:
        self._kept: dict[int, T] = {}

    def forget_old(self) -> None:
        """All but the newest: the next one comes now."""
        newest = list(self._kept.items())[1 - KEPT :]
        self._kept = dict(newest)

    def keep(self, version: int, what: T) -> None:
        """The newest one; its number may be any."""
        known = {v: kept for v, kept in self._kept.items() if v != version}
        self._kept = dict([*known.items(), (version, what)][-KEPT:])

    def of(self, version: int) -> T:
        """KeyError when it was let go: a bug of whoever asks."""
        return self._kept[version]
