"""When the next container may be started. Pure.

Promise: at most `at_once` starts at a time; after trouble of the engine nobody tries again before
a pause that doubles with each further trouble up to `longest_s`, and one success ends it; a start
is tried `tries` times. Times in seconds.
"""

from __future__ import annotations

from muster.types import Value


class BootRules(Value, frozen=True):
    at_once: int = 4
    tries: int = 3
    first_s: float = 0.2
    longest_s: float = 5.0


class Boots:
    """Starts of one engine."""

    def __init__(self, rules: BootRules):
        self.rules = rules
        self._troubles = 0
        self._not_before = 0.0

    def wait_s(self, now: float) -> float:
        """How long the next try has to wait; 0 when it may begin."""
        return max(0.0, self._not_before - now)

    def failed(self, now: float) -> None:
        """The engine could not start one."""
        pause = min(self.rules.first_s * 2**self._troubles, self.rules.longest_s)
        self._troubles = min(self._troubles + 1, 16)
        self._not_before = max(self._not_before, now + pause)

    def succeeded(self) -> None:
        self._troubles, self._not_before = 0, 0.0
