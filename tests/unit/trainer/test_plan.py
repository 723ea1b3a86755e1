"""What a step trains on."""

from __future__ import annotations

from services.trainer.lineage import NO_PARENT, Lineage
from services.trainer.plan import plan_step
from tests.unit.trainer.stories import batch, group, prompt, sampled, trajectory

LINE = Lineage({0: NO_PARENT, 1: 0, 2: 1}, 2)


def test_episodes_that_do_not_count_are_not_in_it() -> None:
    plan = plan_step(batch(*group("g", 1.0, None, 0.0)), LINE)
    assert plan.trajectories == 2
    assert [plan.ids[s.trajectory] for s in plan.sequences] == ["g.0.0", "g.2.0"]


def test_both_contexts_of_an_episode_carry_its_one_advantage() -> None:
    split = trajectory("g", 0, 1.0, [prompt(1), sampled(2), prompt(3), sampled(4)])
    plan = plan_step(batch(split, *group("g", 1.0, 0.0)[1:]), LINE)
    assert len(plan.sequences) == 3
    assert plan.advantages[0] == plan.advantages[1] > 0
    assert plan.credit.groups[0].valid == 2


def test_lag_is_the_mean_over_trajectories() -> None:
    old = trajectory("g", 0, 1.0, [prompt(), sampled(1, version=0)])
    new = trajectory("g", 1, 0.0, [prompt(), sampled(1, version=1)])
    assert plan_step(batch(old, new), LINE).lag_mean_versions == 1.5
