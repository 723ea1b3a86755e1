"""What a task's author is told of a set-up that failed."""

from __future__ import annotations

import pytest

from muster.errors import Exhausted, InvalidInput
from services.sandbox import checks
from services.sandbox.box import Evidence

FAILED = Evidence(exit_code=1)


def refused(shown: str, printed: str = "") -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        checks.setup(shown, FAILED, printed)
    return caught.value


def test_a_failed_line_is_named_by_file_and_number() -> None:
    error = refused("environment/Dockerfile line 4: make all", "no rule")
    assert (error.field, error.value) == ("environment/Dockerfile line 4", "make all")
    assert "ended with 1: no rule" in error.problem


@pytest.mark.parametrize(
    ("command", "printed"),
    [("pip install requests", "gave up"), ("./get.sh", "curl: (6) Could not resolve host: x")],
)
def test_a_line_that_wanted_a_network_is_told_that_first(command: str, printed: str) -> None:
    error = refused(f"Dockerfile line 2: {command}", printed)
    assert error.problem.startswith("boxes have no network")
    assert "COPY" in error.way_out


def test_any_other_line_is_not_said_to_want_one() -> None:
    assert refused("Dockerfile line 2: false").problem.startswith("a RUN line")


def test_a_line_that_takes_too_long_names_the_setting() -> None:
    with pytest.raises(Exhausted, match="too long") as caught:
        checks.setup("Dockerfile line 2: sleep 9", Evidence(timed_out=True), "")
    assert caught.value.field == "Dockerfile line 2"
    assert "sandbox.setup_timeout_s" in caught.value.way_out
