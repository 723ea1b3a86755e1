"""Baselines with a barrier: all groups of a batch start together, the trainer waits for the last.

Owns: `plain` (each turn to the least-loaded replica) and `strong` (sticky least-loaded sessions).
Both start a cold box for each attempt, run a group again whole when the infrastructure takes one of
its siblings (at once, the other siblings are stopped), and share the loop of episodes.py.
"""

from __future__ import annotations

from sim.rollout.baselines.episodes import Episode, Group, Loop
from sim.rollout.baselines.fleet import Engines

MOVE_AT, MOVE_TIMES = 8, 2  # as published by the sticky table of vllm-project/router


def sticky_least_loaded(engines: Engines, home: int) -> int:
    """Home, unless it has at least 8 requests more and twice as many as the least loaded."""
    least = engines.least_loaded()
    if home < 0:
        return least
    here, there = engines.in_flight[home], engines.in_flight[least]
    return least if here - there >= MOVE_AT and here >= MOVE_TIMES * there else home


class Plain(Loop):
    """Collects a batch, waits for all of it, starts the next."""

    name = "plain"

    def begin(self) -> None:
        self._batch: list[Group] = []
        self._next_batch()

    def place(self, episode: Episode) -> int:
        flight = self.engines.in_flight
        return flight.index(min(flight))

    def complete(self, group: Group) -> None:
        if all(group.done == self.regime.group_size for group in self._batch):
            self.cut(self._batch)
            if not self.enough:
                self._next_batch()

    def _next_batch(self) -> None:
        self._batch = [self.open_group() for _ in range(self.regime.groups)]
        for group in self._batch:
            for episode in group.siblings:
                self.launch(episode)


class Strong(Plain):
    """The same with sticky sessions."""

    name = "strong"

    def place(self, episode: Episode) -> int:
        return sticky_least_loaded(self.engines, episode.home)
