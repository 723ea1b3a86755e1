"""A dumb box: what a sandbox would do with commands, without running anything.

Owns: a state that depends on every command so far, and a count of what ran. Promise: equal commands
in equal order give equal outputs, but for a command that prints the time; each execution is
counted, so that a repeat is seen. Does not cover: when a box may exist (pool.py is the real one).
"""

from __future__ import annotations

from collections import Counter
from zlib import crc32

PRINTS_TIME = "date"


class DumbBox:
    """One box. `executed`: how often each turn's command began to run here."""

    def __init__(self, name: str, episode: str):
        self.name, self.episode = name, episode
        self.dead = self.sealed = False
        self.executed: Counter[int] = Counter()
        self.commands: list[tuple[int, str]] = []
        self._state = crc32(episode.partition(".")[0].encode())

    def run(self, turn: int, command: str, wall_s: float) -> tuple[int, bytes]:
        """Exit code and output."""
        self.executed[turn] += 1
        self.commands.append((turn, command))
        self._state = crc32(command.encode(), self._state)
        time = f" {wall_s:.3f}" if PRINTS_TIME in command else ""
        return self._state % 2, f"state {self._state:08x}{time}".encode()

    def reward(self, share: float) -> float:
        """The verdict over its state: 1.0 for about `share` of all states."""
        return 1.0 if crc32(b"reward", self._state) % 1000 < share * 1000 else 0.0
