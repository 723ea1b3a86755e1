"""Replies parsed, observations worded."""

from __future__ import annotations

import pytest

from muster.replay import output_text
from muster.types import FinishReason
from services.router import chat
from services.router.chat import Reply
from services.router.events import Message

STOP, CUT = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("text", "finish", "want"),
    [
        ("```bash\nls\n```", STOP, Reply("ls")),
        ("Sure.\n```bash\nls -l\npwd\n```\nand\n```bash\nrm x\n```", STOP, Reply("ls -l\npwd")),
        ("```sh\nls\n```", STOP, Reply("ls")),
        ("```\nls\n```", STOP, Reply("ls")),
        ("```python\nprint()\n```", STOP, Reply()),
        ("```bash\nls", STOP, Reply("ls")),
        ("```bash\nrm -rf /tmp/wor", CUT, Reply()),
        ("```bash\nls\n```\nmore te", CUT, Reply("ls")),
        ("```bash\n\n```", STOP, Reply()),
        ("It works.\nDONE\n", STOP, Reply(done=True)),
        ("DONE, I think", STOP, Reply()),
        ("DONE\nreally", STOP, Reply()),
        ("```bash\nls\n```\nDONE", STOP, Reply("ls")),
        ("", STOP, Reply()),
        ("```bash\ncat <<'X'\n```\nX\n```", STOP, Reply("cat <<'X'")),
    ],
)
def test_the_first_block_counts_else_done_as_last_line(
    text: str, finish: FinishReason, want: Reply
) -> None:
    assert chat.parse(text, finish) == want


@pytest.mark.parametrize("command", ["x" * 101, "é" * 51, "echo a\0b"], ids=["long", "wide", "nul"])
def test_a_command_that_no_box_can_run_is_a_reply_that_cannot_be_read(command: str) -> None:
    assert chat.parse(f"```bash\n{command}\n```", STOP, bytes_max=100) == Reply()


def test_a_command_as_long_as_may_be_is_run() -> None:
    assert chat.parse(f"```bash\n{'x' * 100}\n```", STOP, bytes_max=100).command == "x" * 100


def test_output_says_how_much_was_left_out_and_survives_cut_characters() -> None:
    text = output_text("é".encode()[:1], b"tail", 105)
    assert text == "�\n[… 100 bytes left out …]\ntail"


def test_short_output_stands_as_it_is() -> None:
    assert output_text(b"a\n", b"", 2) == "a\n"


def test_an_observation_names_exit_code_time_and_limit() -> None:
    assert chat.observation(137, 10.04, "half", "time") == (
        "exit=137 time=10.0s ended by the time limit\nhalf"
    )


def test_the_opening_ends_with_the_task() -> None:
    opening = chat.opening("  Make it.\n")
    assert opening[0].role == "system"
    assert opening[-1] == Message("user", "Task: Make it.")
