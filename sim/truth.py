"""What truly happened to attempts, whatever anybody believes: the ground of labels.

Owns: the time that the model acted, in steady time, and the hosts that a command really took with
it. Promise: told by replicas and hosts themselves, never by a router. Does not cover: what is said
of it (checks.py).
"""

from __future__ import annotations

from collections import defaultdict

from sim.box import DumbBox


class Truth:
    """Of one world; `episode` is an attempt's id."""

    def __init__(self) -> None:
        self.acted: dict[str, float] = defaultdict(
            float
        )  # episode → seconds of its tokens and commands
        self.finished: set[tuple[str, int]] = set()  # turns whose result is durable
        self._killed: dict[tuple[str, int], set[str]] = {}

    def box_died(self, box: DumbBox, host: str) -> None:
        """By itself or with its host. Its newest command may have done it, unless its result was
        known before, as in a replay."""
        if box.commands:
            self.struck(box.episode, box.commands[-1][0], host)

    def struck(self, episode: str, turn: int, host: str) -> None:
        """A box was found dead with this command in it."""
        if (episode, turn) not in self.finished:
            self._killed.setdefault((episode, turn), set()).add(host)

    def killed(self, episode: str) -> int:
        """Most hosts that died under one and the same command."""
        return max((len(h) for (e, _), h in self._killed.items() if e == episode), default=0)
