"""The stories in containers see what is now, come to an end, and find moments under load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.compose import loaded
from tests.e2e.compose_project import Failed, Job, Line

_LINE: Line = {
    "groups_total": 8, "groups_complete": 0, "groups_trained": 0, "groups_filtered": 0,
    "episodes_running": 0, "turns": 0, "policy_version": 0,
}  # fmt: skip
_TELL = f"import json, sys\ndef tell(n): print(json.dumps({_LINE} | dict(turns=n)))\n"


@contextmanager
def job(script: str) -> Iterator[tuple[Job, subprocess.Popen[str]]]:
    """A stand-in for `muster submit --wait --json`; tell(turns) is a line of its progress."""
    with subprocess.Popen(
        [sys.executable, "-u", "-c", _TELL + script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield Job(process, lambda text: None), process


def test_lines_that_came_during_a_restart_are_not_taken_for_what_is_now() -> None:
    turns: list[int] = []
    with job("tell(1)\nsys.stdin.read()\nfor n in range(2, 9): tell(n)") as (one, process):

        def at(line: Line) -> None:
            turns.append(line["turns"])
            if turns == [1]:  # busy with a restart, while the job goes on
                assert process.stdin is not None
                process.stdin.close()
                one._reader.join(60)

        one.follow(at)
    assert turns == [1, 8]


def test_a_job_that_hangs_ends_its_story() -> None:
    with job("tell(1)\nsys.stdin.read()") as (one, process):
        with pytest.raises(Failed, match="had not ended after 0 s"):
            one.follow(lambda line: None, within_s=0.0)
        assert process.returncode is not None


def test_a_job_that_fails_fails_its_story() -> None:
    with job("sys.exit(3)") as (one, _), pytest.raises(Failed, match="status 3"):
        one.follow(lambda line: None)


@pytest.mark.parametrize(
    ("service", "line", "felt"),
    [
        ("router", {"turns": 14, "episodes_running": 3}, True),
        ("router", {"turns": 13, "episodes_running": 3}, False),  # no work since the one before
        ("router", {"turns": 40, "episodes_running": 0}, False),  # the batch is being trained
        ("trainer", {"turns": 40, "groups_complete": 8, "groups_trained": 4}, True),
        ("trainer", {"turns": 40, "groups_complete": 7, "groups_trained": 4}, False),
        ("trainer", {"turns": 40, "episodes_running": 3}, False),  # it waits for a batch
    ],
)
def test_a_restart_falls_where_it_is_felt(service: str, line: dict[str, Any], felt: bool) -> None:
    assert loaded(service, _LINE | line, 10) is felt
