"""The baseline `async-strong`: what the best public asynchronous loops do.

Owns: concurrency by KV pressure. Sticky sessions, a warm queue, the first complete groups are
trained and the rest carried on; a group hurt by the infrastructure runs again whole.

Pressure = contexts of all live programs (running or in a tool) / KV of the fleet. Below 0.6 the
loop launches. Above that it does not even replace the programs that end, so it is trimmed before
it reaches 0.8; a loop that goes on replacing them up to 0.8 was slower, since started programs
grow. A started program is never stopped: that would throw its tokens away.
"""

from __future__ import annotations

from sim.rollout.baselines.carrying import Carrying
from sim.rollout.baselines.episodes import Episode

GROW_BELOW = 0.6


class AsyncStrong(Carrying):
    """Concurrency grows while the pressure is low and is trimmed when it is high."""

    name = "async-strong"

    def begin(self) -> None:
        self.pressure_tokens = 0
        super().begin()

    def may_launch(self) -> bool:
        kv = self.regime.kv_tokens * self.regime.replicas
        return self.pressure_tokens < GROW_BELOW * kv

    def grown(self, episode: Episode, tokens: int) -> None:
        super().grown(episode, tokens)
        self.pressure_tokens += tokens

    def settled(self, episode: Episode) -> None:
        self.launch_more()

    def hurt(self, episode: Episode) -> None:
        group = episode.group
        group.done = 0
        for other in group.siblings:
            self.stop(other)
        queued = set(map(id, (*self.again, *self.fresh)))
        self.again.extend(x for x in group.siblings if id(x) not in queued)
        self.launch_more()
