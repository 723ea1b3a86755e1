"""A process that can be killed, stopped and woken, in the world.

Owns: incarnations. Promise: what an ended incarnation had under way never happens; what came while
a process was stopped happens when it wakes, in order. Does not cover: what a process does.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.world import WALL_START_S, Do, World


class Process:
    """One process of one service; `life` counts its incarnations. Subclasses write `boot`."""

    def __init__(self, world: World, name: str, role: str):
        self.world, self.name, self.role = world, name, role
        self.life = 0
        self.up = self.hung = False
        self.exits = 0
        self.wall_offset_s = 0.0
        self.doing: dict[int, str] = {}  # calls under way, by number: what they are
        self._held: list[Do] = []
        self._serving: dict[int, Do] = {}  # callers to be told when this process dies
        self._served = 0

    def boot(self) -> None:
        """A new incarnation begins."""

    def died(self) -> None:
        """The incarnation has ended; nothing of it may act."""

    def begin(self) -> None:
        if not self.up:
            self.up = True
            self.boot()

    def wall(self) -> float:
        """This machine's wall clock: it may jump."""
        return WALL_START_S + self.world.now + self.wall_offset_s

    def soon(self, delay_s: float, do: Do) -> None:
        """Do it in this incarnation, or never."""
        if not self.up:
            return  # the rest of a handler that was killed in its midst
        life = self.life

        def run() -> None:
            if life != self.life:
                return
            if self.hung:
                self._held.append(run)
                return
            do()

        self.world.after(delay_s, run)

    def every(self, period_s: float, do: Do) -> None:
        """Again and again in this incarnation."""

        def again() -> None:
            do()
            self.soon(period_s, again)

        self.soon(period_s, again)

    def kill(self, down_s: float) -> None:
        """SIGKILL; a supervisor starts it again after `down_s`."""
        if not self.up:
            return
        self.world.note(self.name, "killed")
        self.up = self.hung = False
        self.life += 1
        self._held.clear()
        self.doing.clear()
        broken, self._serving = list(self._serving.values()), {}
        self.died()
        for tell in broken:
            tell()
        life = self.life
        self.world.after(down_s, lambda: self.begin() if life == self.life else None)

    def exit(self, why: str) -> None:
        """It ends by itself; the supervisor starts it again."""
        self.world.note(self.name, f"exits: {why}")
        self.exits += 1
        self.kill(1.0)

    def hang(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after `for_s`."""
        if self.up and not self.hung:
            self.world.note(self.name, f"stopped for {for_s:.1f} s")
            self.hung = True
            life = self.life
            self.world.after(for_s, lambda: self.wake() if life == self.life else None)

    def wake(self) -> None:
        """SIGCONT."""
        if not self.hung:
            return
        self.world.note(self.name, "goes on")
        self.hung = False
        held, self._held = self._held, []
        for do in held:
            self.world.after(0.0, do)

    def serving(self, broken: Do) -> Callable[[], None]:
        """A call is being served; `broken` tells its caller when this process dies first."""
        self._served += 1
        number = self._served
        self._serving[number] = broken
        return lambda: self._serving.pop(number, None) and None
