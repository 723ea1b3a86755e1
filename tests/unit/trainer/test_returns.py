"""Which groups the trainer gives back, and what its checkpoints keep because of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from muster.leased import BatchMember, FrozenBatch, GroupBack, TrainBatch, Trajectory
from muster.types import SamplingParams
from services.trainer.figures import Mismatch
from services.trainer.ports import Stage as Stages
from services.trainer.returns import REVISED_MAX, compared, to_keep, to_return
from sim.builders import scored
from tests.unit.trainer.stories import batch, group
from tests.unit.trainer.test_driver import Stage

BATCH = TrainBatch(
    FrozenBatch(1, tuple(BatchMember(g, (0, 0)) for g in "abc")),
    tuple(
        Trajectory(g, "t", n, 0, scored(1.0), (), SamplingParams()) for g in "abc" for n in (0, 1)
    ),
    predicted_kl={"a.0.0": 0.04, "a.1.0": 0.02, "c.1.0": 9.0},
    returns_left=1,
)


def found(**kls: float) -> dict[str, Mismatch]:
    """Keys as "a0": the trajectory a.0.0."""
    return {f"{name[0]}.{name[1]}.0": Mismatch(tokens=9, k3=kl) for name, kl in kls.items()}


def test_a_group_goes_by_its_worst_trajectory_the_worst_group_first() -> None:
    measured = found(a0=0.3, a1=0.0, b0=0.1, b1=0.1, c0=0.2, c1=0.5)
    assert to_return(BATCH, measured, 0.25) == (
        GroupBack("c", "kl", 0.5),
        GroupBack("a", "kl", 0.3),
    )


def test_none_goes_back_unless_asked_for_and_allowed() -> None:
    measured = found(a0=9.0)
    assert to_return(BATCH, measured, 0.0) == ()
    assert to_return(replace(BATCH, returns_left=0), measured, 0.1) == ()
    assert to_return(BATCH, {"a.0.0": Mismatch(tokens=0, k3=9.0)}, 0.1) == ()


def test_bounds_are_compared_with_what_was_measured_on_the_same_trajectories() -> None:
    measured = {**found(a0=0.02, a1=0.01, b0=7.0), "c.1.0": Mismatch()}
    assert compared(BATCH, measured) == (0.03, 0.015)
    assert compared(replace(BATCH, predicted_kl={}), measured) == (None, None)


def _of(step: int, revision: int = 0) -> FrozenBatch:
    return FrozenBatch(step, (BatchMember("g", (0,)),), revision=revision)


def test_a_checkpoint_keeps_all_from_the_first_batch_that_was_revised() -> None:
    first = to_keep((), (_of(1), _of(2, 1)))
    assert [b.step for b in first] == [1, 2]
    second = to_keep(first, (_of(3),))
    assert [b.step for b in second] == [2, 3]
    assert [b.step for b in to_keep((_of(1),), (_of(2),))] == [2]


def test_it_does_not_keep_them_for_ever() -> None:
    kept = to_keep((), (_of(1, 1),))
    for step in range(2, REVISED_MAX + 2):
        kept = to_keep(kept, (_of(step),))
    assert [b.step for b in kept] == [REVISED_MAX + 1]


async def test_a_step_is_made_of_the_batch_without_what_went_back(tmp_path: Path) -> None:
    """The fake policy finds g1 and z above 0.008 (by a hash of their names), y below it. The
    checkpoint keeps the batch as it was trained; the next incarnation brings that."""
    stage = Stage(tmp_path, steps=1)
    stage.settings = replace(stage.settings, return_kl=0.008)
    stage.bank.spare = [batch(*group(name, 1.0, 0.0), step=1) for name in ("z", "y")]
    leased = stage.bank.batches[1]
    stage.bank.batches[1] = replace(leased, returns_left=2, predicted_kl={"y.1.0": 0.5})
    await stage.run()
    assert stage.bank.returned == [(1, "g1"), (1, "z")]
    durable = [r for r in stage.versions.records if r.stage is Stages.DURABLE and r.report]
    (report,) = (record.report for record in durable)
    assert report is not None
    assert (report.groups, report.groups_returned) == (1, 2)
    assert (report.predicted_kl, report.measured_kl) == (0.5, pytest.approx(0.0079, abs=1e-4))
    stage.bank.batches[2] = batch(*group("g0", 1.0, 0.0), step=2)
    await stage.run()
    await stage.run()
    assert stage.bank.brought == [1, 2]


async def test_with_none_left_to_return_it_trains_on_what_there_is(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=1)
    stage.settings = replace(stage.settings, return_kl=0.008)
    await stage.run()  # the batch says that none of it is taken back
    assert (stage.bank.returned, stage.bank.acknowledged) == ([], [0, 1])


async def test_a_step_that_is_trained_again_gives_nothing_back(tmp_path: Path) -> None:
    """After going back, what the replicas serve may be too far off for a group in its place."""
    stage = Stage(tmp_path, steps=1)
    stage.settings = replace(stage.settings, return_kl=0.008)
    stage.bank.batches[1] = replace(stage.bank.batches[1], returns_left=2)
    stage.bank.leased.add(1)  # an incarnation before had it
    await stage.run()
    assert (stage.bank.returned, stage.bank.acknowledged) == ([], [0, 1])
