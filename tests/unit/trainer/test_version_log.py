"""What the versions stream says of a step."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from muster.v1 import events_pb2 as ev
from services.trainer.adapters.version_log import record_to_pb
from services.trainer.figures import Mismatch, MismatchBucket, StepFigures, StepReport
from services.trainer.ports import Stage, VersionRecord

FOUND = Mismatch(
    tokens=11,
    k1=-0.25,
    k3=0.5,
    max_abs=4.0,
    ess_fraction=0.75,
    truncated_share=0.125,
    mean_abs=0.0625,
    ratio_p01=0.375,
    ratio_p999=3.5,
    ess_turn=0.625,
)


def step_of(*buckets: MismatchBucket) -> ev.StepReport:
    report = StepReport(
        step=3,
        figures=StepFigures(mismatch=FOUND, buckets=buckets),
        tokens=11,
        trajectories=2,
        groups_with_variance=1,
        groups=1,
        excluded=0,
        lag_mean_versions=0.5,
    )
    return record_to_pb(VersionRecord(3, 2, "d", "", Stage.TRAINED, report)).step


def test_a_bucket_keeps_every_figure() -> None:
    """All of them differ, so that none can stand in another's place."""
    (told,) = step_of(MismatchBucket(2, 256, 1024, FOUND)).mismatch
    assert told == ev.MismatchBucket(
        lag_versions=2,
        position_from=256,
        position_to=1024,
        tokens=11,
        k1=-0.25,
        k3=0.5,
        mean_abs=0.0625,
        max_abs=4.0,
        ratio_p01=0.375,
        ratio_p999=3.5,
        ess_token=0.75,
        ess_turn=0.625,
        truncated_share=0.125,
    )


def test_no_figure_of_a_bucket_is_left_out() -> None:
    (told,) = step_of(MismatchBucket(2, 256, 1024, FOUND)).mismatch
    fields = ev.MismatchBucket.DESCRIPTOR.fields
    assert all(getattr(told, field.name) for field in fields)
    assert len(fields) == 3 + len(Mismatch.__struct_fields__)


def test_buckets_are_told_in_their_order() -> None:
    buckets = [MismatchBucket(lag, 0, 256, FOUND) for lag in (0, 2, 16)]
    assert [bucket.lag_versions for bucket in step_of(*buckets).mismatch] == [0, 2, 16]


def test_the_last_bucket_reaches_as_far_as_any_context() -> None:
    (told,) = step_of(MismatchBucket(0, 65536, 2**31 - 1, FOUND)).mismatch
    assert told.position_to == 2**31 - 1


def test_the_whole_step_is_told_beside_its_buckets() -> None:
    told = step_of()
    assert (told.mismatch_k1, told.mismatch_k3, told.mismatch_max_abs) == (-0.25, 0.5, 4.0)
    assert (told.ess_fraction, told.truncated_share) == (0.75, 0.125)
    assert list(told.mismatch) == []


@pytest.mark.parametrize("stage", list(Stage))
def test_a_version_without_a_step_has_no_figures(stage: Stage) -> None:
    told = record_to_pb(VersionRecord(0, -1, "d", "folder", stage))
    assert not told.HasField("step")
    assert not told.HasField("step_kl")


def test_a_step_that_was_measured_on_nothing_is_told_as_not_measured() -> None:
    """0 would say that the policy did not move."""
    for tokens, told in ((0, False), (8, True)):
        figures = StepFigures(step_kl=0.0, step_kl_tokens=tokens)
        report = StepReport(3, figures, 1, 1, 1, 1, 0, 0.0)
        record = record_to_pb(VersionRecord(3, 2, "d", "", Stage.TRAINED, report))
        assert record.HasField("step_kl") is told


def test_what_the_bank_predicted_stands_beside_what_was_measured() -> None:
    report = StepReport(3, StepFigures(), 1, 1, 1, 1, 0, 0.0)
    without = record_to_pb(VersionRecord(3, 2, "d", "", report=report)).step
    assert not without.HasField("predicted_kl")
    report = replace(report, groups_returned=2, predicted_kl=0.5, measured_kl=0.25)
    told = record_to_pb(VersionRecord(3, 2, "d", "", report=report)).step
    assert (told.groups_returned, told.predicted_kl, told.measured_kl) == (2, 0.5, 0.25)
