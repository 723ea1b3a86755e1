"""What the asynchronous baselines share: the first complete groups are trained.

Owns: the queue of what to launch, the complete groups. Promise: the rest is carried on; groups are
launched in the order of the task set, what was lost before what is new. Does not cover: when to
launch (the subclasses).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque

from sim.rollout.baselines.barrier import sticky_least_loaded
from sim.rollout.baselines.episodes import Episode, Group, Loop


class Carrying(Loop):
    """Launches while `may_launch` says so, one attempt after the other."""

    spares = 16

    def begin(self) -> None:
        self.again: deque[Episode] = deque()  # lost: to be launched first
        self.fresh: deque[Episode] = deque()  # of the group that is being launched
        self.finished_groups: list[Group] = []
        self.launch_more()

    @abstractmethod
    def may_launch(self) -> bool:
        """Whether one more attempt may start now (a box is free already)."""

    def launch_more(self) -> None:
        """Launch what may be launched. After the last batch only what is open goes on."""
        while self.boxes.available > 0 and self.may_launch():
            if self.again:
                self.launch(self.again.popleft())
                continue
            if not self.fresh:
                if self.enough:
                    return
                self.fresh.extend(self.open_group().siblings)
            self.launch(self.fresh.popleft())

    def box_freed(self) -> None:
        self.launch_more()

    def place(self, episode: Episode) -> int:
        return sticky_least_loaded(self.engines, episode.home)

    def complete(self, group: Group) -> None:
        self.finished_groups.append(group)
        if self.enough:
            self.recorder.completed_after(group.id, self.heap.now)
        elif len(self.finished_groups) == self.regime.groups:
            self.cut(self.finished_groups)
            self.finished_groups = []
        self.launch_more()

    @property
    def over(self) -> bool:
        return self.enough and not (self.follow and (self.live or self.again or self.fresh))
