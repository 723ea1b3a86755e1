"""What the commands of the machines come to in simulated time, told through one episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from muster.types import Outcome
from services.router import events as e
from sim.rollout import router_actor
from sim.rollout.arms import MUSTER, Arm
from sim.rollout.doing import Doing
from sim.rollout.muster import World
from sim.rollout.talk import prompt_marks
from sim.rollout.workload import TB_LIKE, Plan, Regime, Turn, Workload

ONE = msgspec.structs.replace(
    TB_LIKE, name="one", groups=1, group_size=2, boxes=8, replicas=1, hazard_per_s=1e-12
)
PLAN = Plan(
    turns=(Turn(100, 50, 7.0), Turn(200, 50, 11.0), Turn(0, 20, 0.0)),
    prompt_tokens=3000,
    box_start_s=30.0,
    start_fails=False,
    box_life_s=1e12,
    verify_s=5.0,
    reward=1.0,
    context_full=False,
    tokens=3420,
    alone_s=40.0,
)


class Seen:
    """All that was said, by kind, with its time."""

    def __init__(self, world: World):
        self.world = world
        self.events: list[tuple[float, e.RouterEvent]] = []
        self.commands: list[tuple[float, e.RouterCommand]] = []
        world.router.watch = self

    def __call__(self, event: e.RouterEvent, commands: list[e.RouterCommand]) -> None:
        now = self.world.heap.now
        self.events.append((now, event))
        self.commands += [(now, command) for command in commands]

    def heard(self, kind: type[Any]) -> list[tuple[float, Any]]:
        return [(at, event) for at, event in self.events if isinstance(event, kind)]

    def told(self, kind: type[Any]) -> list[tuple[float, Any]]:
        return [(at, command) for at, command in self.commands if isinstance(command, kind)]


def lived(
    change: Callable[[int], Plan] = lambda attempt: PLAN, arm: Arm = MUSTER, regime: Regime = ONE
) -> Seen:
    """The first batch, one group of two siblings, whose attempts have the plans that are given."""

    class Given(Workload):
        def plan(self, group: int, sibling: int, attempt: int) -> Plan:
            return change(attempt)

    world = World(arm, regime, 101, 1)
    world.router.workload = Given(regime, 101)
    seen = Seen(world)
    world.run(follow=False)
    return seen


def of_first(found: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """Those of the first group's first sibling."""
    return [x for x in found if x[1].episode.group[-5:] == "00000" and x[1].episode.sibling == 0]


def first(seen: Seen, kind: type[Any]) -> list[tuple[float, Any]]:
    """What was told of the first group's first sibling."""
    return of_first(seen.told(kind))


def heard(seen: Seen, kind: type[Any]) -> list[tuple[float, Any]]:
    """What was heard of it."""
    return of_first(seen.heard(kind))


def test_a_turn_takes_its_tool_time_and_the_last_one_has_no_tool() -> None:
    seen = lived()
    steps = [event for _, event in heard(seen, e.StepFinished)]
    assert [step.wall_s for step in steps] == [7.0, 11.0]
    assert [step.output_tokens for step in steps] == [100, 200]


def test_the_context_grows_by_reply_and_observation() -> None:
    replies = [reply for _, reply in heard(lived(), e.Generated)]
    assert [reply.prompt_tokens for reply in replies] == [3000, 3150, 3400]
    assert replies[2].cached_tokens == 3200 // 16 * 16 - 16  # the last token's KV is not there


def test_siblings_and_groups_share_marks_only_where_they_share_tokens() -> None:
    one, other = prompt_marks(TB_LIKE, 0, 128), prompt_marks(TB_LIKE, 1, 128)
    assert len(one) == 3000 // 128
    assert set(one) & set(other) == set(one[: 1800 // 128])


def test_a_reply_is_scored_by_its_plan() -> None:
    seen = lived(lambda attempt: PLAN._replace(reward=0.0))
    assert first(seen, e.RecordEpisode)[0][1].label.outcome is Outcome.MODEL_FAILURE


def test_a_lost_box_is_rebuilt_by_running_its_commands_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The box goes during the second step: the first runs again, then the second."""
    monkeypatch.setattr(router_actor, "REPLAY_DIFFERS", 0.0)
    seen = lived(lambda attempt: PLAN._replace(box_life_s=15.0))
    steps = [c.turn for _, c in first(seen, e.Exec)]
    assert steps == [0, 1, 0, 1]
    (lost,) = [at for at, _ in heard(seen, e.StepFailed)]
    (rebuilt,) = [at for at, c in first(seen, e.RecordRestored)]
    assert rebuilt >= lost + 7.0
    assert first(seen, e.RecordEpisode)[0][1].label.replays == 1


def test_a_box_that_prints_something_else_when_rebuilt_costs_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_actor, "REPLAY_DIFFERS", 1.0)
    seen = lived(lambda attempt: PLAN._replace(box_life_s=1e12 if attempt else 15.0))
    lost, whole = [c for _, c in first(seen, e.RecordEpisode)]
    assert (lost.label.outcome, whole.label.outcome) == (
        Outcome.INFRA_FAILURE,
        Outcome.MODEL_SUCCESS,
    )


def test_a_rebuilt_box_adds_nothing_to_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_actor, "REPLAY_DIFFERS", 0.0)
    seen = lived(lambda attempt: PLAN._replace(box_life_s=15.0))
    replies = [reply for _, reply in heard(seen, e.Generated)]
    assert [reply.prompt_tokens for reply in replies] == [3000, 3150, 3400]


def test_a_full_context_ends_the_episode_without_a_verdict() -> None:
    full = PLAN._replace(context_full=True, tokens=3420, verify_s=0.0)
    seen = lived(lambda attempt: full)
    (end,) = [c for _, c in first(seen, e.RecordEpisode)]
    assert (end.label.outcome, end.label.cause) == (Outcome.MODEL_FAILURE, "context")
    assert not first(seen, e.Verify)


def test_a_box_that_does_not_start_is_asked_for_again() -> None:
    seen = lived(lambda attempt: PLAN._replace(start_fails=True))
    asked = first(seen, e.AcquireBox)
    assert len(asked) >= 2
    assert first(seen, e.RecordEpisode)[0][1].label.outcome is Outcome.MODEL_SUCCESS


def test_the_first_sibling_on_a_host_waits_for_the_set_up() -> None:
    seen = lived()
    (granted,) = [box for _, box in heard(seen, e.BoxAcquired)]
    assert granted.end_unix_s - granted.start_unix_s >= PLAN.box_start_s


@pytest.mark.parametrize(
    ("levers", "took_s"), [(("boxes",), ONE.warm_s), ((), PLAN.box_start_s)], ids=("warm", "cold")
)
def test_a_later_sibling_on_a_host_starts_from_the_snapshot(
    levers: tuple[str, ...], took_s: float
) -> None:
    """Eight siblings and four boxes, one a host: four begin when their host knows the task."""
    scarce = msgspec.structs.replace(ONE, group_size=8, boxes=4)
    seen = lived(arm=Arm("tried", levers), regime=scarce)
    took = [c.end_unix_s - c.start_unix_s for _, c in seen.heard(e.BoxAcquired)]
    assert min(took) == pytest.approx(took_s)


def test_whoever_has_a_box_waits_for_the_router_and_not_for_the_box() -> None:
    """A first turn that admission holds is no time of an environment (DESIGN §9)."""
    told: list[tuple[int, int, Doing, float]] = []
    world = World(MUSTER, ONE, 101, 1)
    state = world.recorder.state

    def heard_state(group: int, sibling: int, doing: Doing, now: float) -> None:
        told.append((group, sibling, doing, now))
        state(group, sibling, doing, now)

    world.recorder.state = heard_state  # type: ignore[method-assign]
    seen = Seen(world)
    world.run(follow=False)
    (granted, _), *_ = heard(seen, e.BoxAcquired)
    mine = [(doing, at) for group, sibling, doing, at in told if (group, sibling) == (0, 0)]
    assert mine[0][0] is Doing.BOX_START
    assert mine[1] == (Doing.HOLD, granted)


def test_engines_that_wait_for_boxes_are_seen_to_wait() -> None:
    """One engine, two siblings: nobody samples while their boxes are set up, 30 s."""
    seen = lived()
    (batch, *_) = seen.world.recorder.batches
    assert batch.gpu_wait_s >= PLAN.box_start_s
