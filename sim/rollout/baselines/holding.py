"""The baseline `hold-resume`: programs are held at tool boundaries when a replica's KV is full.

Owns: who is held and resumed. Sticky sessions, warm boxes, the first complete groups are trained,
a lost sibling alone is launched again. Per replica: when a program is ready for its next turn and
the contexts of those that are not held, its own included, exceed 95 % of the KV, it is held;
whenever they are below 80 %, the smallest held program is resumed, if it fits below 95 %.

Choices that made it faster and that its sources leave open: a resumed program has to fit (else
+12 %); nothing is launched where a program is held; a launch needs room for half a mean final
context (25,000 tokens) beside the others, each counted as at least that (else +3 %).
Source: program-level pausing as published (pause at 0.95, down to 0.80, smallest first).
"""

from __future__ import annotations

import heapq
from statistics import fmean

from sim.rollout.baselines.carrying import Carrying
from sim.rollout.baselines.episodes import Episode
from sim.rollout.doing import Doing
from sim.rollout.workload import Regime, Workload

PAUSE_ABOVE, RESUME_BELOW = 0.95, 0.80


def mean_final_context(regime: Regime, *, tasks: int = 256) -> float:
    """Tokens at the end of an episode, from tasks of a seed that nothing else uses."""
    workload = Workload(regime, seed=-1)
    return fmean(workload.plan(task, 0, 0).tokens for task in range(tasks))


class HoldResume(Carrying):
    """`loads`: contexts at home on each replica that are not held."""

    name = "hold-resume"
    reserve_share = 0.5  # of the workload's mean final context: kept for a young program

    def begin(self) -> None:
        replicas = self.regime.replicas
        self.reserve = int(self.reserve_share * mean_final_context(self.regime))
        self.loads = [0] * replicas
        self.reserved = [0] * replicas  # what small programs miss to `reserve`
        self.held: list[list[tuple[int, int, Episode]]] = [[] for _ in range(replicas)]
        self.counts = [0] * replicas  # held now: `held` keeps those that were lost meanwhile
        self._asked = 0
        super().begin()

    def may_launch(self) -> bool:
        return self._roomiest() >= 0

    def place(self, episode: Episode) -> int:
        return episode.home

    def launch(self, episode: Episode) -> None:
        replica = self._roomiest()
        super().launch(episode)
        self.sit(episode, replica)
        self.loads[replica] += episode.context
        self.reserved[replica] += max(self.reserve - episode.context, 0)

    def grown(self, episode: Episode, tokens: int) -> None:
        before, home = episode.context, episode.home
        super().grown(episode, tokens)
        if home >= 0 and not episode.held:
            self.loads[home] += tokens
        if home >= 0 and before < self.reserve:
            after = episode.context
            self.reserved[home] += (max(self.reserve - after, 0) if after else 0) - (
                self.reserve - before
            )

    def ready(self, episode: Episode) -> None:
        home = episode.home
        if self.loads[home] <= PAUSE_ABOVE * self.regime.kv_tokens:
            self.generate(episode)
            return
        self._asked += 1
        episode.held = self._asked
        self.loads[home] -= episode.context
        self.counts[home] += 1
        heapq.heappush(self.held[home], (episode.context, self._asked, episode))
        self._tell(episode, Doing.HOLD)
        self._resume(home)

    def stop(self, episode: Episode) -> None:
        if episode.held:
            self.counts[episode.home] -= 1
            self.loads[episode.home] += episode.context  # taken off again as it leaves
            episode.held = 0
        super().stop(episode)

    def settled(self, episode: Episode) -> None:
        for replica, count in enumerate(self.counts):
            if count:
                self._resume(replica)
        self.launch_more()

    def hurt(self, episode: Episode) -> None:
        self.again.append(episode)
        self.launch_more()

    def _resume(self, replica: int) -> None:
        """Smallest first; it waits until it fits beside the others."""
        held, kv = self.held[replica], self.regime.kv_tokens
        while self.counts[replica] and self.loads[replica] < RESUME_BELOW * kv:
            context, number, episode = held[0]
            if episode.held == number:
                load = self.loads[replica]
                if load and load + context > PAUSE_ABOVE * kv:
                    return
                episode.held = 0
                self.counts[replica] -= 1
                self.loads[replica] += context
                heapq.heappop(held)
                self.generate(episode)
            else:  # lost meanwhile
                heapq.heappop(held)

    def _roomiest(self) -> int:
        """The replica with the least load of those where nothing is held; -1: none has room."""
        best, least = -1, self.regime.kv_tokens - self.reserve + 1
        for replica, load in enumerate(self.loads):
            if load + self.reserved[replica] < least and not self.counts[replica]:
                best, least = replica, load + self.reserved[replica]
        return best
