"""One run of the production machines on the models."""

from __future__ import annotations

import msgspec
import pytest

from services.router import events as e
from sim.rollout import arms
from sim.rollout.arms import MACHINE_PLAIN, MUSTER, Arm
from sim.rollout.muster import World
from sim.rollout.workload import TB_LIKE, Spread

TINY = msgspec.structs.replace(
    TB_LIKE,
    name="tiny",
    groups=2,
    group_size=3,
    boxes=8,
    replicas=2,
    kv_tokens=60_000,
    context_limit=40_000,
    turns=Spread(6, 0.8),
    turns_max=12,
)


def ran(arm: Arm = MUSTER, *, seed: int = 101, trace: bool = False) -> World:
    world = World(arm, TINY, seed, 2, checks=True, trace=trace)
    world.run()
    return world


@pytest.mark.parametrize("arm", [MUSTER, MACHINE_PLAIN, *arms.ALONE, *arms.MINUS])
def test_every_arm_runs_to_its_end_and_holds_what_must_hold(arm: Arm) -> None:
    world = ran(arm)
    assert world.figures().fates == 1.0
    assert world.checks is not None
    assert world.checks.done > 500


def test_equal_seeds_give_equal_traces_and_others_do_not() -> None:
    first, again, other = (ran(seed=s, trace=True).heap.trace for s in (101, 101, 102))
    assert first == again
    assert first != other


def test_the_job_has_as_many_groups_as_all_batches_take() -> None:
    world = ran()
    trained = [member.group for _, batch in world.bank.batches for member in batch.members]
    assert len(trained) == len(set(trained)) == len(world.bank.batches) * TINY.groups


def test_only_the_batches_asked_for_are_measured() -> None:
    world = ran()
    assert len(world.figures().intervals_s) == 1
    assert len(world.bank.batches) > 2


def test_with_a_barrier_no_group_begins_before_the_last_batch_is_whole() -> None:
    world = World(MACHINE_PLAIN, TINY, 101, 3)
    opened: list[tuple[float, str]] = []

    def saw(event: e.RouterEvent, commands: list[e.RouterCommand]) -> None:
        for command in commands:
            if isinstance(command, e.OpenGroup):
                opened.append((world.heap.now, command.group))

    world.router.watch = saw
    world.run(follow=False)
    first_cut = world.bank.batches[0][0]
    before = [group for at, group in opened if at < first_cut]
    assert len(before) == TINY.groups + len(world.bank.filtered)


def test_the_bank_lets_later_groups_run_before_the_batch_is_whole() -> None:
    world = ran()
    assert any(sample.lag > 0 for sample in (*world.recorder.samples, *world.recorder.followed))


def test_seconds_of_an_interval_are_all_accounted_for() -> None:
    for batch in ran().recorder.batches:
        assert sum(batch.split.values()) == pytest.approx(batch.interval_s)
