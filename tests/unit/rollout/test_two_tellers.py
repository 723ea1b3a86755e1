"""The machine without levers and the program `plain` tell the same of the same two episodes."""

from __future__ import annotations

from typing import Any

import pytest

from services.router import events as e
from sim.rollout.arms import MACHINE_PLAIN, MUSTER
from sim.rollout.baselines.barrier import Plain
from sim.rollout.figures import RunFigures
from sim.rollout.muster import World
from sim.rollout.workload import Plan, Turn, Workload
from tests.unit.rollout.test_actors import ONE as DISTURBED
from tests.unit.rollout.test_actors import PLAN, Seen
from tests.unit.rollout.test_waiting_engines import ONE

TURNS = (Turn(900, 4_000, 60.0), Turn(300, 900, 20.0), Turn(0, 20, 0.0))
PLANS = (PLAN._replace(turns=TURNS, tokens=9_120), PLAN._replace(verify_s=70.0))


class Given(Workload):
    """One plan a sibling."""

    def plan(self, group: int, sibling: int, attempt: int) -> Plan:
        return PLANS[sibling]


def machine() -> RunFigures:
    world = World(MACHINE_PLAIN, ONE, 101, 3)
    world.router.workload = Given(ONE, 101)
    world.run(follow=False)
    return world.figures()


def program() -> RunFigures:
    made: Any = Plain(ONE, 101, 3, follow=False)
    made.workload = Given(ONE, 101)
    return made.run()  # type: ignore[no-any-return]


def test_seconds_go_to_the_same_states() -> None:
    assert machine().split_s == pytest.approx(program().split_s, abs=0.3)


@pytest.mark.parametrize("what", ["prefilled_tokens", "recomputed_tokens", "busy", "gpu_wait_s"])
def test_engines_are_told_to_have_done_the_same(what: str) -> None:
    assert getattr(machine(), what) == pytest.approx(getattr(program(), what), rel=0.02)
    assert getattr(machine(), what) > 0


def test_running_commands_again_is_a_part_of_the_start_of_a_box() -> None:
    """Seven seconds each of the first step's second run: nothing new is learnt by it."""
    told: list[tuple[str, float]] = []
    world = World(MUSTER, DISTURBED, 101, 1)

    class Dies(Workload):
        def plan(self, group: int, sibling: int, attempt: int) -> Plan:
            return PLAN._replace(box_life_s=1e12 if attempt or group else 15.0)

    world.router.workload = Dies(DISTURBED, 101)
    state = world.recorder.state

    def heard(group: int, sibling: int, doing: Any, now: float) -> None:
        if (group, sibling) == (0, 0):
            told.append((str(doing), now))
        state(group, sibling, doing, now)

    world.recorder.state = heard  # type: ignore[method-assign]
    seen = Seen(world)
    world.run()
    mine = [
        at for at, c in seen.told(e.Exec) if _first(c) and c.turn == 0 and not c.episode.attempt
    ]
    assert len(mine) == 2
    assert [doing for doing, at in told if at == mine[1]][-1] == "box_start"


def _first(command: Any) -> bool:
    key = command.episode
    return bool(key.group[-5:] == "00000" and key.sibling == 0)
