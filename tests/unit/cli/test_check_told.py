"""What `muster tasks check` says of a try that went wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.cli.check import judgement
from muster.cli.check_plan import Plan, Try, plan
from muster.cli.check_told import OUTPUT_CHARACTERS, Tried, show
from muster.taskset import Task, read_task
from muster.v1 import sandbox_pb2 as pb
from tests.unit.cli.test_check import BENCH, HARBOR, make

NOTHING = Plan((), (), ())
SOLVE = Try("solve", "true", 1.0)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return read_task(make(tmp_path / "harbor", HARBOR))


def gave(reward: float, output: str = "", **more: object) -> pb.VerifyResponse:
    status = pb.VERDICT_STATUS_REWARDED
    return pb.VerifyResponse(status=status, reward=reward, output_tail=output.encode(), **more)


def test_a_wrong_reward_says_what_the_verifier_gave_and_how_the_script_ended(
    task: Task, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = judgement(task, SOLVE, gave(0.0, exit_code=3), "ended with 127", "bash: jq: oh no")
    assert show([tried], NOTHING, as_json=False) == 1
    said = capsys.readouterr().out
    assert "harbor solve: 0, wanted 1: the verifier gave 0, and ended with 3" in said
    assert "the solve script ended with 127" in said
    assert "bash: jq: oh no" in said


def test_an_output_is_shown_from_its_end(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    """That is where the cause stands."""
    output = "BEGIN\n" + "x" * 50_000 + "\nthe cause"
    tried = judgement(task, SOLVE, gave(0.0, output), "ended with 0", "")
    show([tried], NOTHING, as_json=False)
    said = capsys.readouterr().out
    assert "the cause" in said
    assert "BEGIN" not in said
    show([tried], NOTHING, as_json=True)
    event = json.loads(capsys.readouterr().out.splitlines()[0])
    assert event["output"].endswith("the cause")
    assert len(event["output"]) == OUTPUT_CHARACTERS + 1


def test_verbose_shows_the_lines(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    output = "\n".join(f"line {number} of the output" for number in range(100))
    tried = judgement(task, SOLVE, gave(0.0, output), "ended with 0", "")
    show([tried], NOTHING, as_json=False)
    short = capsys.readouterr().out
    show([tried], NOTHING, as_json=False, verbose=True)
    assert "    line 0 of the output\n" in capsys.readouterr().out
    assert "line 0 of" not in short
    assert "--verbose" in short


def test_what_a_box_printed_obeys_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tried = Tried("a", "solve", 1.0, 0.0, "why", "\x1b[2J", "ended with 1", "\x1b[2J", "\x1b[2J")
    for verbose in (False, True):
        show([tried], NOTHING, as_json=False, verbose=verbose)
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        ("curl: (6) Could not resolve host: astral.sh", "boxes have no network"),
        ("ERROR: No matching distribution found for pytest", "boxes have no network"),
        ("/tests/run-tests.sh: line 3: pytest: command not found", "pytest is not in the box"),
        ("/usr/bin/python3: No module named pytest", "pytest is not in the box"),
    ],
)
def test_the_signs_of_a_missing_network_or_tool_lead_to_a_base(
    task: Task, output: str, hint: str
) -> None:
    failed = pb.VerifyResponse(
        status=pb.VERDICT_STATUS_SETUP_FAILED, exit_code=127, output_tail=output.encode()
    )
    tried = judgement(task, SOLVE, failed, "ended with 0", "")
    assert tried.hint.startswith(hint)
    assert "docs/SANDBOX.md" in tried.hint


@pytest.mark.parametrize(
    ("files", "key"), [(HARBOR, "verifier.timeout_sec"), (BENCH, "max_test_timeout_sec")]
)
def test_a_verifier_that_is_too_slow_names_the_key_of_its_limit(
    tmp_path: Path, files: dict[str, str], key: str
) -> None:
    late = pb.VerifyResponse(status=pb.VERDICT_STATUS_TIMEOUT, detail="ended by its limit")
    tried = judgement(read_task(make(tmp_path / "t", files)), SOLVE, late, "ended with 0", "")
    assert tried.reward is None
    assert key in tried.detail
    assert "in time" in tried.hint


def test_a_right_try_says_nothing(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    tried = judgement(task, SOLVE, gave(1.0, "noise"), "ended with 0", "noise")
    assert show([tried], NOTHING, as_json=False) == 0
    assert "noise" not in capsys.readouterr().out


def test_two_folders_of_one_name_are_told_apart_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"task.toml": "[task]\nname = 'same'"}
    make(tmp_path / "one", HARBOR | named)
    make(tmp_path / "two", HARBOR | named)
    planned = plan(tmp_path, 1)
    assert {task.name for task, _ in planned.work} == {"same"}
    assert len(planned.work) == 3
    [note] = planned.refused
    assert (note.field, "one and two" in note.text) == ("task.name", True)
    assert show([Tried("same", "solve", 1.0, 1.0, "")], planned, as_json=False) == 1
    said = capsys.readouterr().out
    assert "same (two)" in said
    assert said.count("refused  ") == 2  # a row of its own, of three cells


def test_what_a_verifier_fetches_is_remarked_on(tmp_path: Path) -> None:
    script = "# pip install x\nuv pip install pytest\npytest -rA\n"
    make(tmp_path / "t", BENCH | {"run-tests.sh": script})
    told = [note for note in plan(tmp_path, 1).remarks if note.field.startswith("run-tests.sh")]
    assert [note.field for note in told] == ["run-tests.sh line 2"]
    assert "no network" in told[0].text


def test_lines_that_end_as_windows_ends_them_are_remarked_on(tmp_path: Path) -> None:
    make(tmp_path / "t", HARBOR)
    (tmp_path / "t" / "tests" / "test.sh").write_bytes(b"true\r\n")
    assert [n for n in plan(tmp_path, 1).remarks if "CR LF" in n.text]
