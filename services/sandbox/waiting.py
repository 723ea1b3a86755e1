"""The callers that wait for a box, in the order in which they are served.

Owns: the queue. Promise: pure; first is whose attempt began to wait first, in whichever call: one
that asks again after its deadline, or whose box was found dead, stands where it stood. Does not
cover: who is served (pool.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from services.sandbox.events import Asked


class Waiting:
    """By ticket."""

    def __init__(self) -> None:
        self._asked: dict[int, Asked] = {}  # in order

    def add(self, asked: Asked) -> None:
        last = next(reversed(self._asked.values()), None)
        self._asked[asked.ticket] = asked
        if last is not None and _place(asked) < _place(last):
            found = sorted(self._asked.values(), key=_place)
            self._asked = {asked.ticket: asked for asked in found}

    def drop(self, ticket: int) -> None:
        """It waits no more, if it did."""
        self._asked.pop(ticket, None)

    def __iter__(self) -> Iterator[Asked]:
        """A copy: whoever is met may be dropped."""
        return iter([*self._asked.values()])

    def __len__(self) -> int:
        return len(self._asked)


def _place(asked: Asked) -> tuple[float, int]:
    return asked.since, asked.ticket
