"""`muster tasks check` in real boxes, on our own tasks of every format."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.root

FORMATS = Path(__file__).parents[1] / "tasks_formats"


def check(folder: Path, state: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and objects of the command, as a person would start it."""
    config = state / "muster.toml"
    config.write_text(f'state_dir = "{state / "state"}"\n')
    command = [sys.executable, "-m", "muster.cli.main", "tasks", "check", str(folder)]
    done = subprocess.run(
        [*command, "--config", str(config), "--json"], capture_output=True, text=True, timeout=110
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", ["harbor-all", "tb1-all"])
def test_tasks_of_each_format_reward_their_solution_and_only_that(
    tmp_path: Path, name: str
) -> None:
    status, said = check(FORMATS / name, tmp_path)
    tried = [(one["task"], one["way"], one["reward"]) for one in said if one["event"] == "tried"]
    wanted = {"nothing": 0.0, "wrong": 0.0, "solve": 1.0}
    assert [row for row in tried if row[2] != wanted[row[1]]] == []
    assert len(tried) == 3 * len(
        [path for path in (FORMATS / name).iterdir() if path.name[0] != "_"]
    )
    assert status == 0


def test_a_set_of_both_formats_is_tried_whole_and_what_is_refused_is_told(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name, path in (
        ("bench", "tb1-all/defaults"),
        ("harbor", "harbor-all/image-only"),
        ("refused", "tb1-all/_refused/everything"),
    ):
        (mixed / name).symlink_to(FORMATS / path)
    status, said = check(mixed, tmp_path)
    assert status == 1
    ended = said[-1]
    assert (ended["event"], ended["tries"], ended["wrong"], ended["refused"]) == (
        "checked",
        6,
        0,
        1,
    )
    assert "run_tests_in_same_shell" in [one["field"] for one in said if one["event"] == "refused"]


def test_the_examples_reward_their_solution_and_only_that(tmp_path: Path) -> None:
    status, said = check(Path(__file__).parents[2] / "examples", tmp_path)
    assert status == 0
    assert sorted({one["task"] for one in said if one["event"] == "tried"}) == [
        "live-service",
        "terminal-bench",
    ]


def test_a_box_that_cannot_be_made_is_told_once_and_what_the_host_cuts_is_remarked(
    tmp_path: Path,
) -> None:
    for name, dockerfile, toml in (
        ("broken", "FROM scratch\nRUN echo cause; exit 3\n", ""),
        ("unknown", "FROM nixos/nix:2\n", ""),
        ("slow", "FROM scratch\n", "[verifier]\ntimeout_sec = 3000\n"),
    ):
        folder = tmp_path / "set" / name
        for path, text in (
            ("instruction.md", "Do it."),
            ("task.toml", toml),
            ("environment/Dockerfile", dockerfile),
            ("tests/test.sh", "echo 0 > /logs/verifier/reward.txt\nfalse\n"),
            ("solution/solve.sh", "echo from the script; exit 4"),
            ("solution/wrong.sh", "false"),
        ):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    status, said = check(tmp_path / "set", tmp_path)
    assert status == 1
    refused = [(one["task"], one["field"]) for one in said if one["event"] == "refused"]
    assert sorted(refused) == [
        ("broken", "environment/Dockerfile line 2"),
        ("unknown", "environment/Dockerfile FROM"),
    ]
    [remark] = [one for one in said if one["event"] == "remark"]
    assert (remark["task"], remark["field"]) == ("slow", "verifier.timeout_sec")
    assert "900 s" in remark["text"]
    tried = {one["way"]: one for one in said if one["event"] == "tried"}
    assert {one["task"] for one in tried.values()} == {"slow"}
    assert tried["solve"]["script"] == "ended with 4"
    assert "from the script" in tried["solve"]["script_output"]
    assert "the verifier gave 0, and ended with 1" in tried["solve"]["detail"]
