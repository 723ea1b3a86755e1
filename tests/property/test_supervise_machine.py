"""Whatever processes do and whenever a stop comes, the supervisor keeps its promises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.supervise.machine import (
    Exited,
    Finish,
    Healthy,
    Kill,
    Rules,
    ServiceRule,
    Start,
    StopAsked,
    SupervisorMachine,
    Terminate,
    Tick,
)

NAMES = ("redis", "bank", "router", "trainer", "router-2")
RULES = Rules(
    (
        ServiceRule("redis", last=True),
        ServiceRule("bank", after=("redis",), outlives=("router", "router-2")),
        ServiceRule("router", after=("redis",)),
        ServiceRule("trainer", after=("redis",)),
        ServiceRule("router-2", after=("redis", "router")),
    )
)

moves = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.01, 40.0)),
    st.tuples(st.just("die"), st.tuples(st.sampled_from(NAMES), st.sampled_from([0, 1, 2, 137]))),
    st.tuples(st.just("heal"), st.sampled_from(NAMES)),
    st.tuples(st.just("stop"), st.none()),
)


class World:
    """Processes that only start and end; checks every command against them."""

    def __init__(self) -> None:
        self.machine = SupervisorMachine(RULES)
        self.now = 0.0
        self.alive: set[str] = set()
        self.finished: Finish | None = None
        self.stopping = False

    def feed(self, event: Tick | Healthy | Exited | StopAsked) -> None:
        if isinstance(event, StopAsked):
            self.stopping = True
        for command in self.machine.handle(event, self.now):
            assert self.finished is None, "nothing comes after the end"
            match command:
                case Start(name):
                    assert not self.stopping
                    assert name not in self.alive
                    assert name == "redis" or "redis" in self.alive
                    self.alive.add(name)
                case Terminate(name) | Kill(name):
                    assert name in self.alive
                case Finish():
                    self.finished = command

    def die(self, name: str, status: int) -> None:
        if name in self.alive:
            self.alive.discard(name)
            self.feed(Exited(name, status, "words"))


@given(st.lists(st.one_of(moves), max_size=40))
def test_starts_and_stops_are_always_in_order_and_a_stop_always_ends(
    script: list[tuple[str, object]],
) -> None:
    world = World()
    world.feed(Tick())
    for kind, what in script:
        if world.finished:
            break
        if kind == "wait":
            assert isinstance(what, float)
            world.now += what
            world.feed(Tick())
        elif kind == "die":
            name, status = what  # type: ignore[misc]
            world.die(name, status)
        elif kind == "heal" and what in world.alive:
            world.feed(Healthy(str(what)))
        elif kind == "stop":
            world.feed(StopAsked())
    asked = world.now
    if not world.finished:
        world.feed(StopAsked())
    while not world.finished:
        world.now += 0.1
        world.feed(Tick())
    assert world.now - asked <= RULES.hard_s + 0.2
