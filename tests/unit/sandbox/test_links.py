"""Links into what is the verifier's own go before its script runs; others stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.sandbox.adapters.native import links


@pytest.mark.parametrize(
    "target",
    [
        "/tests",
        "/tests/expected.txt",
        "/logs/verifier/reward.txt",
        "/proc/self/fd/0",
        "/proc/self/root/app/answer.txt",
        "//tests//x",
        "/no/such/folder/../../../tests/x",
        "/",
        "/usr/..",
    ],
)
def test_a_link_into_the_verifier_s_own_is_a_snare_also_before_its_target_is_there(
    target: str, tmp_path: Path
) -> None:
    assert links.leads_there(str(tmp_path), target)
    up = "../" * len(tmp_path.parts)
    assert links.leads_there(str(tmp_path), up + target.lstrip("/"))


def test_a_link_by_way_of_others_is_one_too(tmp_path: Path) -> None:
    (tmp_path / "second").symlink_to("/tests")
    (tmp_path / "first").symlink_to("second")
    assert links.leads_there(str(tmp_path), "first/expected.txt")
    (tmp_path / "input").symlink_to("/dev/stdin")
    assert links.leads_there(str(tmp_path), "input")


@pytest.mark.parametrize("target", ["here", "/testsuite", "/usr/bin/env", "sub/../here", "loop"])
def test_other_links_are_none(target: str, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    assert not links.leads_there(str(tmp_path), target)


def test_cutting_finds_them_at_any_depth_and_touches_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "kept").symlink_to("folder")
    (tmp_path / "answer").symlink_to("/tests/expected.txt")
    (tmp_path / "folder" / "deep").symlink_to("/logs")
    (tmp_path / "plain").write_text("mine")
    assert links.cut(str(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "kept", "plain"]


def test_folders_deeper_than_any_path_hide_none(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("x" * 200, dir_fd=here)
        inner = os.open("x" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.symlink("/tests", "deep", dir_fd=here)
    assert links.cut(str(tmp_path)) == 1
    assert os.listdir(here) == []
    os.close(here)
