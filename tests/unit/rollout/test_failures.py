"""What the infrastructure takes: in both regimes, from warm boxes too, and more than once."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from msgspec.structs import replace

from services.router import events as e
from sim.rollout.arms import MUSTER
from sim.rollout.muster import World
from sim.rollout.router_actor import UNIX_S
from sim.rollout.workload import ENV_BOUND, TB_LIKE, Plan, Regime, Workload
from tests.unit.rollout.test_actors import ONE, PLAN, Seen

KEPT = PLAN._replace(box_life_s=1e12)


def lived(plans: dict[tuple[int, int], Plan], regime: Regime) -> Seen:
    """Every group of the job; the plans of the first by (sibling, attempt), others undisturbed."""

    class Given(Workload):
        def plan(self, group: int, sibling: int, attempt: int) -> Plan:
            return KEPT if group else plans.get((sibling, attempt), KEPT)

    world = World(MUSTER, regime, 101, 1)
    world.router.workload = Given(regime, 101)
    seen = Seen(world)
    world.run()
    return seen


def of(found: list[tuple[float, Any]], sibling: int, attempt: int = 0) -> list[Any]:
    """What concerns one attempt of group 0."""
    keys = [(x, x.episode) for _, x in found]
    return [
        x
        for x, k in keys
        if (k.sibling, k.attempt) == (sibling, attempt) and k.group[-5:] == "00000"
    ]


@pytest.mark.parametrize("regime", [TB_LIKE, ENV_BOUND], ids=lambda regime: regime.name)
def test_one_mean_episode_in_a_hundred_loses_its_box(regime: Regime) -> None:
    workload = Workload(regime, 3)
    mean_s = statistics.fmean(workload.plan(group, 0, 0).alone_s for group in range(3000))
    assert mean_s * regime.hazard_per_s == pytest.approx(0.01, rel=0.15)


def test_a_box_lives_as_long_as_its_regimes_hazard_says() -> None:
    workload = Workload(TB_LIKE, 3)
    life_s = statistics.fmean(workload.plan(group, 0, 0).box_life_s for group in range(2000))
    assert life_s * TB_LIKE.hazard_per_s == pytest.approx(1.0, rel=0.1)


def test_a_start_from_the_snapshot_fails_as_its_plan_says() -> None:
    """Eight siblings and four boxes, one a host: the last four find their task set up."""
    fails = {(sibling, 0): KEPT._replace(start_fails=True) for sibling in range(4, 8)}
    seen = lived(fails, replace(ONE, group_size=8, boxes=4))
    refused = [len(of(seen.heard(e.BoxRefused), sibling)) for sibling in range(8)]
    assert refused == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_box_that_takes_a_lost_ones_place_may_be_lost_too() -> None:
    """Boxes that are rebuilt live for a second on average; the first command takes seven."""
    dies = {(0, 0): KEPT._replace(box_life_s=15.0)}
    seen = lived(dies, replace(ONE, hazard_per_s=1.0))
    assert len(of(seen.heard(e.StepFailed), 0)) > 1


def test_no_two_rebuilt_boxes_share_their_fate() -> None:
    """Their lives are drawn for each start: equal ones would always end at the same command."""
    dies = {(0, 0): KEPT._replace(box_life_s=15.0)}
    seen = lived(dies, replace(ONE, hazard_per_s=1.0))
    lost = [at for at, event in seen.heard(e.StepFailed) if event.episode.attempt == 0]
    granted = [at for at, event in seen.heard(e.BoxAcquired) if of([(at, event)], 0)]
    lives = [round(end - start, 6) for start, end in zip(granted[1:], lost[1:], strict=False)]
    assert len(set(lives)) == len(lives) > 1


def test_a_box_that_came_up_against_the_odds_may_be_lost_soon() -> None:
    """Whether a start leads to a box says nothing of how long that box lives."""
    dies = {(sibling, 0): KEPT._replace(box_life_s=15.0) for sibling in range(8)}
    seen = lived(dies, replace(ONE, group_size=8, start_failure=0.5, hazard_per_s=1.0))
    lives = []
    for sibling in range(8):
        granted = [event.end_unix_s for event in of(seen.heard(e.BoxAcquired), sibling)]
        lost = [UNIX_S + at for at, x in seen.heard(e.StepFailed) if of([(at, x)], sibling)]
        lives += [end - start for start, end in zip(granted[1:], lost[1:], strict=False)]
    assert len(lives) >= 8
    assert min(lives) < math.log(2)  # the median: half are shorter


def test_a_request_that_keeps_a_cache_alive_is_work_of_its_engine() -> None:
    """A large conversation ends while its sibling is at its tool: what the touch prefills is in the
    engine's count and in no turn's."""
    large, small = PLAN.turns[0]._replace(observation_tokens=30_000), PLAN.turns[0]
    last = PLAN.turns[-1]
    plans = {
        (0, 0): KEPT._replace(turns=(large, last), tokens=33_100),
        (1, 0): KEPT._replace(turns=(small._replace(tool_s=60.0), last), tokens=3_200),
    }
    seen = lived(plans, ONE)
    assert of(seen.told(e.Touch), 1)
    replies = [event for _, event in seen.heard(e.Generated)]
    of_turns = sum(reply.prompt_tokens - reply.cached_tokens for reply in replies)
    (model,) = seen.world.models.values()
    assert not model.running
    assert model.prefilled_tokens > of_turns
