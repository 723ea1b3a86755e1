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


def test_lag_is_counted_from_the_first_sampled_token() -> None:
    """Of an episode over versions 0, 1 and 2, at version 2: two steps, not one and not none."""
    turns = [prompt(), sampled(1, version=0), sampled(2, version=1), sampled(3, version=2)]
    batches = batch(trajectory("g", 0, 1.0, turns), trajectory("g", 1, 0.0, turns))
    assert plan_step(batches, LINE).lag_mean_versions == 2.0


def test_lag_is_the_mean_over_trajectories() -> None:
    old = trajectory("g", 0, 1.0, [prompt(), sampled(1, version=0)])
    new = trajectory("g", 1, 0.0, [prompt(), sampled(1, version=1)])
    assert plan_step(batch(old, new), LINE).lag_mean_versions == 1.5


def test_tokens_of_an_abandoned_version_are_trained_with_their_lag_over_the_fork() -> None:
    """A batch that was frozen before a trainer went back is sent again unchanged."""
    branched = Lineage({0: NO_PARENT, 1: 0, 2: 1, 3: 1}, 3)
    items = [trajectory("g", i, float(i), [prompt(), sampled(1, version=2)]) for i in range(2)]
    plan = plan_step(batch(*items), branched)
    assert (plan.trajectories, plan.lag_mean_versions) == (2, 2.0)


def test_a_sibling_at_the_mean_of_its_group_is_not_held_aside() -> None:
    plan = plan_step(batch(*group("g", 0.0, 0.5, 1.0), *group("h", 1.0, 1.0)), LINE)
    assert plan.advantages[1] == 0.0
    assert (plan.with_contrast, plan.without_contrast) == ((0, 1, 2), (3, 4))
