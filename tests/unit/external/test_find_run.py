"""Where a run is, and what a checkpoint remembers of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.errors import InvalidInput, Unavailable
from muster.find_run import find_run
from muster.leased import BatchMember, FrozenBatch
from muster.seat import RESUME_FILE, ResumePoint, read_resume, write_resume
from muster.supervise.plan import config_file
from muster.supervise.state import runtime_dir

AT = ResumePoint("main", 3, 2, 3, 2, "d", (FrozenBatch(3, (BatchMember("g", (0, 1)),)),))


def test_a_named_server_is_enough(tmp_path: Path) -> None:
    found = find_run(state_dir=tmp_path, redis_url="redis://there:6379", run="other")
    assert (found.redis.url, found.run) == ("redis://there:6379", "other")


def test_folders_and_files_may_be_given_as_text(tmp_path: Path) -> None:
    file = tmp_path / "muster.toml"
    file.write_text('run = "r7"\n')
    found = find_run(str(file), state_dir=str(tmp_path), redis_url="redis://there:6379")
    assert (found.run, found.state_dir) == ("r7", tmp_path.resolve())


def test_what_runs_with_the_state_folder_is_taken_as_it_is_configured(tmp_path: Path) -> None:
    runtime = runtime_dir(tmp_path.resolve())
    runtime.mkdir()
    try:
        config_file(runtime).write_text(
            f'run = "r7"\nstate_dir = "{tmp_path}"\ngroups_per_batch = 9\n'
            '[redis]\nurl = "unix:///there"\n'
        )
        found = find_run(state_dir=tmp_path)
    finally:
        config_file(runtime).unlink()
        runtime.rmdir()
    assert (found.run, found.groups_per_batch, found.redis.url) == ("r7", 9, "unix:///there")


def test_where_nothing_runs_it_says_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no `muster up` runs") as caught:
        find_run(state_dir=tmp_path)
    assert "--without trainer" in caught.value.way_out


def test_a_resume_point_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_resume(tmp_path) is None
    write_resume(tmp_path, AT)
    assert read_resume(tmp_path) == AT
    assert [path.name for path in tmp_path.iterdir()] == [RESUME_FILE]


def test_a_damaged_resume_point_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / RESUME_FILE).write_text("{")
    with pytest.raises(InvalidInput, match="not what a trainer wrote"):
        read_resume(tmp_path)


def test_a_resume_point_needs_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such checkpoint folder"):
        write_resume(tmp_path / "nowhere", AT)
