"""What `muster replay` says of two runs of a step, and of two verdicts."""

from __future__ import annotations

import json

import msgspec
import pytest

from muster.cli.recorded import SeenStep
from muster.cli.replay import Replayed, TurnReplayed, compared, show
from muster.replay import RecordedStep
from muster.types import StepLimit
from muster.v1 import sandbox_pb2 as pb

STEP = RecordedStep(2, "cat a.txt", 0, StepLimit.NONE, "alpha\nbeta\n", 10.0)
TURN = TurnReplayed(2, "cat a.txt", "", 0, True)
DONE = Replayed(
    "job-1-00000.0.1",
    "team/task",
    "h1",
    (TURN,),
    "model_success/rewarded",
    1.0,
    "rewarded",
    1.0,
    "",
)


def answer(output: bytes = b"alpha\nbeta\n", **changes: object) -> pb.ExecResponse:
    said = {"output_head": output, "output_bytes_total": len(output), "limit": 1, **changes}
    return pb.ExecResponse(**said)


def test_equal_observations_are_equal() -> None:
    assert compared(SeenStep(STEP, True), answer()) == TURN


@pytest.mark.parametrize(
    ("again", "told"),
    [
        (answer(b"alpha\ngamma\n"), "line 2 of the output: 'gamma' instead of 'beta'"),
        (answer(exit_code=1), "exit 1 instead of 0"),
        (answer(limit=pb.STEP_LIMIT_TIME), "limit time instead of none"),
        (answer(box_broken=True), "the box broke"),
        (answer(output_bytes_total=99), "4 lines of output instead of 2"),
    ],
)
def test_every_observation_counts(again: pb.ExecResponse, told: str) -> None:
    assert compared(SeenStep(STEP, True), again).difference == told


def test_a_deleted_output_is_not_compared_and_says_so() -> None:
    gone = SeenStep(msgspec.structs.replace(STEP, output=""), whole=False)
    found = compared(gone, answer())
    assert (found.difference, found.output_compared) == ("", False)
    assert compared(gone, answer(exit_code=1)).difference == "exit 1 instead of 0"


def test_an_equal_replay_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(DONE, as_json=False) == 0
    out = capsys.readouterr().out
    assert "turn 2  equal      cat a.txt" in out
    assert "recorded  model_success/rewarded, reward 1\n" in out
    assert out.endswith("equal\n")


@pytest.mark.parametrize(
    "changes",
    [
        {"turns": (msgspec.structs.replace(TURN, difference="exit 1 instead of 0"),)},
        {"verdict_difference": "reward 0 instead of 1", "reward": 0.0},
    ],
)
def test_any_difference_is_status_1(
    changes: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(msgspec.structs.replace(DONE, **changes), as_json=False) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT" in out
    assert "instead of" in out


def test_programs_get_a_line_a_turn_and_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    show(DONE, as_json=True)
    turn, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert (turn["event"], turn["turn"], turn["difference"]) == ("turn", 2, "")
    assert (whole["event"], whole["equal"], whole["reward"]) == ("replayed", True, 1.0)


def test_nothing_of_a_box_reaches_the_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hf_" + "a" * 30
    evil = f"\x1b]0;owned\x07\x9b2J {secret}"
    turn = msgspec.structs.replace(TURN, command=f"echo {evil}", difference=f"line 1: {evil}")
    changed = msgspec.structs.replace(
        DONE, turns=(turn,), verdict=f"invalid {evil}", unfinished=f"cat {evil}", task=evil
    )
    show(changed, as_json=False)
    show(changed, as_json=True)
    out = capsys.readouterr().out
    assert not [c for c in out if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160)]
    assert secret not in out
