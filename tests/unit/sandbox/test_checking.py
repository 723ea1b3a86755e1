"""`--check-host` reads the configuration as the service does."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.sandbox.adapters import checking
from services.sandbox.adapters.native import hierarchies
from services.sandbox.bases import BaseSetting, Kind


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "muster.toml"
    path.write_text(text)
    return path


def test_an_unknown_key_is_told_and_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checking.main(config(tmp_path, "[sandbox]\nboxez = 3\n")) == 2
    assert "sandbox.boxez" in capsys.readouterr().err


def test_a_docker_host_without_an_engine_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'[sandbox]\nbackend = "docker"\ndocker_url = "unix://{tmp_path}/none.sock"\n'
    assert checking.main(config(tmp_path, text)) == 2
    said = capsys.readouterr().out
    assert "MISSING Docker Engine" in said
    assert "cannot run the docker backend" in said


def test_what_makes_answers_up_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checking.main(config(tmp_path, '[sandbox]\nbackend = "fake"\n')) == 0
    assert "made up" in capsys.readouterr().out


def test_a_base_that_is_not_there_or_not_whole_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "root"
    absent = checking.of_base("x", BaseSetting(Kind.FOLDER, str(folder)))
    folder.mkdir()
    empty = checking.of_base("x", BaseSetting(Kind.FOLDER, str(folder)))
    tarball = checking.of_base("x", BaseSetting(Kind.TARBALL, str(tmp_path / "x.tar")))
    (tmp_path / "x.tar").touch()
    there = checking.of_base("x", BaseSetting(Kind.TARBALL, str(tmp_path / "x.tar")))
    assert [absent.well, empty.well, tarball.well, there.well] == [False, False, False, True]
    assert "bash" in empty.what


def test_a_cgroup_mount_that_hides_its_files_is_a_finding(tmp_path: Path) -> None:
    """An empty file system over /sys/fs/cgroup: mountinfo names what cannot be read."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"30 29 0:26 / {tmp_path} rw - cgroup2 none rw\n")
    with pytest.raises(hierarchies.CgroupTrouble) as caught:
        hierarchies.discover(str(mounts))
    assert "cgroup.controllers" in caught.value.problem
    assert "mount" in caught.value.way_out
