"""Equal steps of an engine, taken together.

Owns: how long n steps last, in closed form, and where a call from outside cuts them. Promise: the
same as the sum over single steps. Does not cover: what is in a step (engine.py).
"""

from __future__ import annotations

from math import ceil, sqrt


class Stretch:
    """`steps` steps from second `at` to `end`; the first n last (linear + square * n) * n seconds.

    `share` tokens of each go to a prefill that takes more steps than these. No steps and an end: a
    pause; no end: idle.
    """

    __slots__ = ("at", "end", "linear", "share", "square", "steps")

    def __init__(self, at: float):
        self.at = at
        self.linear = self.square = 0.0
        self.rest()

    def rest(self, until: float | None = None) -> None:
        """No steps, until then or until the next call."""
        self.end: float | None = until
        self.steps = self.share = 0

    def begin(self, steps: int, linear: float, square: float, share: int = 0) -> None:
        """From `at` on."""
        self.steps, self.share = steps, share
        self.linear, self.square = linear, square
        self.end = self.at + (linear + square * steps) * steps

    def cut(self, now: float) -> None:
        """End it with the step that is in progress at `now`."""
        if self.end is None or self.steps <= 1 or now >= self.end:
            return
        n = self.whole(now)
        if (self.linear + self.square * n) * n < now - self.at or n == 0:
            n += 1
        if n < self.steps:
            self.begin(n, self.linear, self.square, self.share)

    def whole(self, now: float) -> int:
        """Steps that are over at `now`."""
        gone, linear, square = now - self.at, self.linear, self.square
        if gone <= 0 or not self.steps:
            return 0
        if square > 0:
            guess = (sqrt(linear * linear + 4 * square * gone) - linear) / (2 * square)
        else:
            guess = gone / linear
        n = min(ceil(guess), self.steps)
        while n and (linear + square * n) * n > gone:
            n -= 1
        while n < self.steps and (linear + square * (n + 1)) * (n + 1) <= gone:
            n += 1
        return n
