"""How many replicas must have a version before any of them serves it.

Owns: the count and the verdict. Promise: the verdict is given once, when every replica has said
whether it holds the version; nobody waits longer than the publication lasts. Does not cover: what
the replicas are told (publisher.py).
"""

from __future__ import annotations

import asyncio
import math

from muster.errors import Unavailable


class Quorum:
    """Of `replicas`; `share` of them must hold the version, 0: nobody waits. Not asked are those of
    them that serve it already (`holding`) and those that failed before (`failed`)."""

    def __init__(self, replicas: int, share: float, *, holding: int = 0, failed: int = 0):
        self._needed = math.ceil(replicas * share - 1e-9)
        self._open = replicas - holding - failed
        self._share, self._holding = share, holding
        self._told: set[str] = set()
        self._over = asyncio.Event()
        if holding >= self._needed:
            self._over.set()

    def holds(self, replica: str) -> None:
        """It has verified all of it."""
        self._tell(replica, 1)

    def fails(self, replica: str) -> None:
        """It will not have it."""
        self._tell(replica, 0)

    def _tell(self, replica: str, one: int) -> None:
        if replica in self._told:
            return
        self._told.add(replica)
        self._holding += one
        self._open -= 1
        if self._open <= 0 or self._holding >= self._needed:
            self._over.set()

    async def wait(self) -> None:
        """Until the verdict is there. Raises Unavailable when too few hold the version."""
        if self._needed == 0:
            return
        await self._over.wait()
        if self._holding < self._needed:
            raise Unavailable(
                f"{self._holding} replicas hold the version, {self._needed} are needed",
                field="transfer.quorum",
                value=self._share,
                way_out="see the errors of the others; all go on with what they serve",
            )
