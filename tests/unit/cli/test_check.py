"""What `muster tasks check` plans to try, and its verdict on what the boxes said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.cli.check_plan import Note, Plan, plan, tries
from muster.cli.check_told import Tried, show
from muster.errors import InvalidInput

NOTHING = Plan((), (), ())
HARBOR = {
    "instruction.md": "Do it.",
    "tests/test.sh": "true",
    "environment/Dockerfile": "FROM x\nCMD sh\n",
    "solution/solve.sh": "true",
    "solution/wrong.sh": "false",
}
BENCH = {
    "task.yaml": "instruction: Do it.\ndifficulty: easy",
    "run-tests.sh": "pytest -rA",
    "Dockerfile": "FROM x\n",
    "solution.yaml": "- command: make\n- command: make install\n",
    "wrong.sh": "false",
}


def make(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_a_right_reward_everywhere_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Tried("a", "nothing", 0.0, 0.0, ""), Tried("a", "solve", 1.0, 1.0, "")]
    assert show(found, NOTHING, as_json=False) == 0
    assert "2 tries, 0 with a wrong reward\n" in capsys.readouterr().out


@pytest.mark.parametrize("reward", [0.0, 0.5, None])
def test_one_wrong_reward_is_status_1(
    reward: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show([Tried("a", "solve", 1.0, reward, "why")], NOTHING, as_json=False) == 1
    assert "✗" in capsys.readouterr().out


def test_a_refused_task_is_status_1_with_each_reason(capsys: pytest.CaptureFixture[str]) -> None:
    refused = (Note("b", "artifacts", "not\x1b[2J collected", "remove it"),)
    found = [Tried("a", "solve", 1.0, 1.0, "")]
    assert show(found, Plan((), refused, ()), as_json=False) == 1
    said = capsys.readouterr().out
    assert "b      refused" in said
    assert "refused: b: artifacts: not" in said
    assert "→ remove it" in said
    assert "\x1b" not in said


def test_programs_get_refusals_and_remarks_as_objects(capsys: pytest.CaptureFixture[str]) -> None:
    planned = Plan((), (Note("b", "x", "no", "yes"),), (Note("a", "y", "nothing"),))
    assert show([], planned, as_json=True) == 1
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in said] == ["remark", "refused", "checked"]
    assert (said[1]["field"], said[1]["way_out"]) == ("x", "yes")
    assert said[2] == {"event": "checked", "tries": 0, "wrong": 0, "refused": 1}


def test_a_remark_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    planned = Plan((), (), (Note("a", "y", "changes nothing"),))
    assert show([Tried("a", "solve", 1.0, 1.0, "")], planned, as_json=False) == 0
    assert "remark: a: y: changes nothing" in capsys.readouterr().out


def test_the_three_tries_come_from_the_solution_folder(tmp_path: Path) -> None:
    make(tmp_path, HARBOR)
    found = [(attempt.way, attempt.script, attempt.wanted) for attempt in tries(tmp_path)]
    assert found == [("nothing", "", 0.0), ("wrong", "false", 0.0), ("solve", "true", 1.0)]


def test_terminal_bench_keeps_its_solutions_beside_the_task(tmp_path: Path) -> None:
    make(tmp_path, BENCH)
    found = [(attempt.way, attempt.script) for attempt in tries(tmp_path)]
    assert found == [("nothing", ""), ("wrong", "false"), ("solve", "make\nmake install\n")]


def test_a_script_stands_before_the_steps_of_a_terminal(tmp_path: Path) -> None:
    make(tmp_path, BENCH | {"solution.sh": "make all"})
    assert tries(tmp_path)[2].script == "make all"


def test_the_solution_s_variables_are_those_of_its_tries_only(tmp_path: Path) -> None:
    make(tmp_path, HARBOR | {"task.toml": "[solution]\nenv = {A = 'b'}"})
    assert [attempt.env for attempt in tries(tmp_path)] == [(), (("A", "b"),), (("A", "b"),)]


def test_a_task_without_a_solution_cannot_be_checked(tmp_path: Path) -> None:
    make(tmp_path, HARBOR)
    (tmp_path / "solution" / "solve.sh").unlink()
    with pytest.raises(InvalidInput, match="needs a solution") as caught:
        tries(tmp_path)
    assert "solution/solve.sh" in caught.value.way_out


def test_a_mixed_set_is_planned_whole_whatever_is_refused_in_it(tmp_path: Path) -> None:
    make(tmp_path / "harbor", HARBOR)
    make(tmp_path / "bench", BENCH)
    make(tmp_path / "broken", HARBOR | {"task.toml": "artifacts = ['x']\n[environment]\ngpus = 1"})
    make(tmp_path / "bare", {"tests/x": "", "solution/solve.sh": "true"})
    planned = plan(tmp_path, 1)
    tried = [(task.name, attempt.way) for task, attempt in planned.work]
    ways = ("nothing", "wrong", "solve")
    assert tried == [(name, way) for name in ("bench", "harbor") for way in ways]
    assert [(note.task, note.field) for note in planned.refused] == [
        ("bare", "task"),
        ("broken", "artifacts"),
        ("broken", "environment.gpus"),
    ]
    assert [(note.task, note.field) for note in planned.remarks] == [
        ("broken", "environment/Dockerfile line 2: CMD"),
        ("harbor", "environment/Dockerfile line 2: CMD"),
    ]


def test_without_a_wrong_solution_the_others_are_tried(tmp_path: Path) -> None:
    make(tmp_path / "harbor", HARBOR)
    (tmp_path / "harbor" / "solution" / "wrong.sh").unlink()
    planned = plan(tmp_path, 1)
    assert [attempt.way for _, attempt in planned.work] == ["nothing", "solve"]
    assert "wrong.sh" in [note.field for note in planned.remarks]
