"""A shell that did not start is the agent's doing on positive evidence only."""

from __future__ import annotations

import errno

import pytest

from services.sandbox.adapters.native.blame import ENTER, EXEC, PREPARE, by_agent, read, told


@pytest.mark.parametrize(
    ("stage", "number", "there", "struck", "agent"),
    [
        (EXEC, errno.E2BIG, True, False, True),  # its own variables
        (EXEC, errno.ENOENT, True, False, True),  # it removed the loader
        (EXEC, errno.ENOENT, False, False, False),  # the host lost its bash
        (EXEC, errno.ENOMEM, True, True, True),  # the box's memory limit struck
        (EXEC, errno.ENOMEM, True, False, False),  # the host's memory is short
        (PREPARE, errno.EAGAIN, True, False, False),
        (PREPARE, errno.E2BIG, True, False, False),
        (ENTER, errno.ENOENT, True, False, False),
        (ENTER, errno.ENODEV, True, True, False),
        (PREPARE, 0, True, True, False),
    ],
)
def test_who_is_to_blame(stage: str, number: int, there: bool, struck: bool, agent: bool) -> None:
    assert by_agent(stage, number, shell_there=there, limit_struck=struck) is agent


def test_what_the_child_told_is_read_back() -> None:
    text = "[Errno 7] Argument list too long: '/usr/bin/bash'"
    stage, number, whole = read(told(EXEC, errno.E2BIG, text))
    assert (stage, number) == (EXEC, errno.E2BIG)
    assert whole == f"{EXEC}: {text}"


def test_what_the_child_told_is_bounded_and_never_fails_to_be_read() -> None:
    assert len(told(EXEC, errno.E2BIG, "ü" * 9999)) <= 500
    assert read(b"")[:2] == ("", 0)
    assert read(b"\xff\xfe garbage")[1] == 0
