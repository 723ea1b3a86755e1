"""Rows of a run: each once, whatever is read again, and a return to a checkpoint is seen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from muster.errors import InvalidInput
from muster.evaluated import EvaluatedGroup
from muster.evaluation import Training
from muster.tracking import Book, Row
from muster.tracking_files import BOARDS, STEPS, Boards, Tracked, read_rows, read_served
from muster.types import SamplingParams
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from tests.unit.evaluation.event_files import scalars
from tests.unit.evaluation.test_figures import FAILED, PASSED, group, sibling

DURABLE, TRAINED = ev.VERSION_STAGE_DURABLE, ev.VERSION_STAGE_TRAINED


def made(
    version: int,
    step: int,
    parent: int,
    stage: ev.VersionStage.ValueType = DURABLE,
    loss: float = 0.5,
) -> ev.PolicyVersionRecord:
    told = ev.StepReport(step=step, loss=loss, clipped_share=0.25, trajectories=8)
    told.mismatch.add(lag_versions=1, position_from=0, position_to=128, k3=0.01, ess_token=0.9)
    return ev.PolicyVersionRecord(
        version=version,
        parent=parent,
        stage=stage,
        at_unix_s=100.0 + version,
        step=told,
        step_kl=0.1,
    )


def published(version: int, step: int) -> ev.PolicyVersionRecord:
    record = made(version, step, version - 1, ev.VERSION_STAGE_PUBLISHED)
    record.publications.add(replica="r0", latency_s=2.0, pause_s=0.1, tokens_lost=3)
    record.publications.add(replica="r1", latency_s=3.0, pause_s=0.3, tokens_lost=4)
    record.publications.add(replica="r2", error="gone")
    return record


def rows_of(book: Book, *records: ev.PolicyVersionRecord) -> list[Row]:
    return [row for record in records for row in book.version(record)]


def test_a_step_is_one_row_with_every_number_of_its_report() -> None:
    book = Book()
    (row,) = rows_of(book, made(1, 1, 0, TRAINED), made(1, 1, 0))
    assert (row.kind, row.step, row.version, row.parent, row.line) == ("step", 1, 1, 0, 1)
    assert row.figures["train/loss"] == 0.5
    assert row.figures["train/clipped_share"] == 0.25
    assert row.figures["train/trajectories"] == 8.0
    assert row.figures["train/step_kl"] == 0.1
    assert row.figures["mismatch/lag_1_from_0/k3"] == 0.01
    measured = {"predicted_kl", "measured_kl"}  # these are absent where they were not
    known = {f.name for f in ev.StepReport.DESCRIPTOR.fields} - {"step", "mismatch", *measured}
    assert {name.partition("/")[2] for name in row.figures if name.startswith("train/")} == {
        *known,
        "step_kl",
    }


def test_what_was_not_measured_is_no_zero() -> None:
    record = made(1, 1, 0)
    record.ClearField("step_kl")
    record.step.predicted_kl = 0.0
    (row,) = rows_of(Book(), record)
    assert row.figures["train/predicted_kl"] == 0.0
    assert not {"train/step_kl", "train/measured_kl"} & row.figures.keys()


def test_a_trainer_that_tells_its_step_alone_is_tracked_without_figures() -> None:
    """As one of one's own does (muster/publish.py): its loss is unknown, and not 0."""
    record = ev.PolicyVersionRecord(version=1, stage=TRAINED, step=ev.StepReport(step=1))
    (row,) = rows_of(Book(), record)
    assert (row.kind, row.step, row.figures) == ("step", 1, {})


def test_a_publication_that_nobody_took_has_no_times() -> None:
    record = made(1, 1, 0, ev.VERSION_STAGE_PUBLISHED)
    record.publications.add(replica="r0", error="gone")
    (row,) = rows_of(Book(), record)
    assert row.figures["publication/replicas_missed"] == 1.0
    assert [name for name in row.figures if name.endswith("_s")] == []


def test_a_figure_that_is_no_number_is_left_out() -> None:
    (row,) = rows_of(Book(), made(1, 1, 0, loss=float("nan")))
    assert "train/loss" not in row.figures
    json.dumps(row.figures, allow_nan=False)


def test_a_publication_is_as_slow_as_its_slowest_replica() -> None:
    (row,) = rows_of(Book([*rows_of(Book(), made(1, 1, 0))]), published(1, 1))
    assert (row.kind, row.step) == ("publication", 1)
    figures = {name.partition("/")[2]: value for name, value in row.figures.items()}
    assert (figures["latency_s"], figures["pause_s"], figures["tokens_lost"]) == (3.0, 0.3, 7.0)
    assert (figures["replicas"], figures["replicas_missed"]) == (2.0, 1.0)


def test_what_was_written_is_not_due_again_after_a_restart() -> None:
    records = [made(1, 1, 0), published(1, 1), made(2, 2, 1)]
    before = rows_of(Book(), *records)
    again = Book(before)
    assert rows_of(again, *records) == []
    assert [row.key for row in rows_of(again, made(3, 3, 2))] == [("step", 3)]


def test_a_trainer_that_goes_back_begins_a_new_line() -> None:
    rows = rows_of(
        Book(), made(1, 1, 0), made(2, 2, 1), made(3, 3, 2), made(4, 2, 1), made(5, 3, 4)
    )
    told = [(row.kind, row.step, row.version, row.line) for row in rows]
    assert told == [
        ("step", 1, 1, 1),
        ("step", 2, 2, 1),
        ("step", 3, 3, 1),
        ("rollback", 1, 4, 2),
        ("step", 2, 4, 2),
        ("step", 3, 5, 2),
    ]
    again = Book(rows)
    assert rows_of(again, made(4, 2, 1), made(5, 3, 4)) == []
    assert [row.line for row in rows_of(again, made(6, 4, 5))] == [2]


def evaluated(job: str, groups: int) -> ev.JobRecord:
    return ev.JobRecord(job=job, groups=groups, purpose=pb.JOB_PURPOSE_EVALUATE)


def of(job: str, name: str, version: int) -> EvaluatedGroup:
    one = group(name, sibling(PASSED, versions=(version,)), sibling(FAILED, versions=(version,)))
    return EvaluatedGroup(name, job, name, one.sampling, 1.0, 9.0, one.siblings)


@pytest.mark.parametrize("job_first", [True, False])
def test_an_evaluation_is_a_row_once_all_its_groups_are_there(job_first: bool) -> None:
    book = Book(rows_of(Book(), made(1, 1, 0), made(2, 2, 1)))
    rows = book.job(evaluated("v", 2)) if job_first else []
    rows += book.group(of("v", "a", 1))
    assert rows == []
    rows = book.group(of("v", "b", 2))
    rows += [] if job_first else book.job(evaluated("v", 2))
    (row,) = rows
    assert (row.kind, row.job, row.version, row.step) == ("evaluation", "v", 2, 2)
    assert row.figures["evaluation/pass_rate"] == 0.5
    assert row.figures["evaluation_tasks/a"] == 0.5
    again = Book([row])
    assert [
        *again.job(evaluated("v", 2)),
        *again.group(of("v", "a", 1)),
        *again.group(of("v", "b", 2)),
    ] == []


# -- files -------------------------------------------------------------------------------


def tracked(folder: Path) -> Tracked:
    return Tracked(folder, [Boards(folder / BOARDS)])


def steps(version: int, step: int | None = None, line: int = 1) -> Row:
    return Row("step", step or version, version, line, 100.0, {"train/loss": 1.0 / version})


def test_the_boards_show_every_step_once_over_a_restart(tmp_path: Path) -> None:
    first = tracked(tmp_path)
    first.write([steps(1), steps(2)])
    first.close()
    again = tracked(tmp_path)
    assert [row.version for row in again.rows] == [1, 2]
    again.write([steps(3)])
    again.close()
    points = scalars(tmp_path / BOARDS / "line-1")["train/loss"]
    assert points == [(1, 1.0), (2, 0.5), (3, round(1 / 3, 6))]


def test_a_step_that_a_crash_kept_from_the_boards_is_drawn_at_the_next_start(
    tmp_path: Path,
) -> None:
    first = tracked(tmp_path)
    first.write([steps(1)])
    first.close()
    without = Tracked(tmp_path)  # as if it had died between the line and the board
    without.write([steps(2), Row("publication", 2, 2, 1, 100.0, {"publication/pause_s": 0.5})])
    tracked(tmp_path).close()
    shown = scalars(tmp_path / BOARDS / "line-1")
    assert shown["train/loss"] == [(1, 1.0), (2, 0.5)]
    assert shown["publication/pause_s"] == [(2, 0.5)]


def test_a_line_of_its_own_keeps_what_was_rolled_back_in_sight(tmp_path: Path) -> None:
    files = tracked(tmp_path)
    files.write([steps(1), steps(2), Row("rollback", 1, 3, 2, 100.0), steps(3, 2, line=2)])
    files.close()
    assert scalars(tmp_path / BOARDS / "line-1")["train/loss"] == [(1, 1.0), (2, 0.5)]
    assert scalars(tmp_path / BOARDS / "line-2")["train/loss"] == [(2, round(1 / 3, 6))]


def test_a_torn_last_line_is_cut_off_and_written_anew(tmp_path: Path) -> None:
    Tracked(tmp_path).write([steps(1), steps(2)])
    path = tmp_path / STEPS
    whole = path.read_bytes()
    for cut in (1, 10, len(whole) // 2 - 1):
        path.write_bytes(whole[: len(whole) - cut])
        assert [row.version for row in read_rows(path)] == [1]
        after = Tracked(tmp_path)
        assert [row.version for row in after.rows] == [1]
        after.write([steps(2)])
        assert path.read_bytes() == whole


def test_a_row_that_a_full_disk_took_half_of_is_taken_back_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Tracked(tmp_path)
    files.write([steps(1)])
    whole = (tmp_path / STEPS).read_bytes()
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda handle, data: write(handle, data[:10]))
        with pytest.raises(OSError, match="10 of"):
            files.write([steps(2)])
    assert (tmp_path / STEPS).read_bytes() == whole
    assert [row.version for row in files.rows] == [1]
    files.write([steps(2)])
    assert [row.version for row in read_rows(tmp_path / STEPS)] == [1, 2]


def test_a_line_in_the_middle_that_is_none_is_an_error_that_names_it(tmp_path: Path) -> None:
    Tracked(tmp_path).write([steps(1)])
    path = tmp_path / STEPS
    path.write_bytes(path.read_bytes() + b"{nonsense}\n")
    with pytest.raises(InvalidInput, match="line 2 is no row"):
        Tracked(tmp_path)


def test_what_the_run_was_served_by_is_kept_for_later(tmp_path: Path) -> None:
    kept = Training("t", SamplingParams(0.7))
    Tracked(tmp_path / "tracking" / "main").served(kept)
    assert read_served(tmp_path, "main") == kept
    assert read_served(tmp_path, "other") is None
