"""Which groups make the next batch.

Owns: the choice. Promise: whole groups only, as many as asked for, made at once when there are
enough, whatever job they are of. First come groups that were overtaken: opened before every group
of the newest `fairness_batches` batches, so those batches were filled with later work; among them
the first opened goes first. Then the oldest complete. Ties by id. Does not cover: admission.

No complete group waits for ever, whichever job it is of: before it go only groups that were
complete earlier, and overtaken ones, which are never opened after it was complete (such a one would
have to come after batches that passed it over already). Those are finitely many: with n groups
known when it became complete, it stands in one of the next n / groups batches, rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from muster.types import Value

NEVER = float("-inf")


class Ready(Value, frozen=True):
    """When a group became complete, and when it was opened; Unix seconds of the streams."""

    complete_unix_s: float
    opened_unix_s: float


def choose(
    ready: Mapping[str, Ready], groups: int, overtaken_before: float = NEVER
) -> tuple[str, ...]:
    """`groups` ids, or none while there are fewer. Groups opened before that time go first."""
    if groups < 1 or len(ready) < groups:
        return ()

    def rank(group: str) -> tuple[bool, float, str]:
        found = ready[group]
        if found.opened_unix_s < overtaken_before:
            return False, found.opened_unix_s, group
        return True, found.complete_unix_s, group

    return tuple(sorted(ready, key=rank)[:groups])


class Overtaken:
    """From which opening on a group was not passed over by each of the newest batches.

    Looks at when the first group of each was opened. For batches that are forgotten (up to the
    mark) that is remembered here, and with the mark.
    """

    def __init__(self, batches: int):
        self._batches = batches
        self._opened: dict[int, float] = {}  # step → when its first group was opened

    def before(self, newest: int, opened_in: Callable[[int], float]) -> float:
        """Groups opened before then go first. `newest`: step of the newest batch."""
        if self._batches == 0 or newest < self._batches:
            return NEVER
        steps = range(newest - self._batches + 1, newest + 1)
        return min(self._in(step, opened_in) for step in steps)

    def mark(self, step: int, opened_in: Callable[[int], float]) -> tuple[float, ...]:
        """Remember the newest batches up to `step`; what to keep of them, oldest first."""
        steps = range(max(1, step - self._batches + 1), step + 1)
        # JSON, which a journal is, knows no infinity; nothing is opened before 0 either.
        self._opened = {s: max(0.0, self._in(s, opened_in)) for s in steps}
        return tuple(self._opened.values())

    def restore(self, step: int, opened: tuple[float, ...]) -> None:
        """What `mark` said for `step`."""
        first = step - len(opened) + 1
        self._opened = {first + number: at for number, at in enumerate(opened)}

    def _in(self, step: int, opened_in: Callable[[int], float]) -> float:
        known = self._opened.get(step)
        return opened_in(step) if known is None else known
