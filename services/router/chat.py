"""The words that agent and box exchange: prompt, reply, observation.

Owns: the prompt's text, the parsing of replies, the wording of observations. Promise: pure; a
reply yields at most one command, the first; what a box printed is only ever data in an
observation. Does not cover: tokens (conversation.py).
"""

from __future__ import annotations

import re

from muster.types import FinishReason, Value
from services.router.carriers import Message, TurnSeen

SYSTEM = (
    "You are a terminal agent. Each reply is one bash command in a ```bash block. "
    "When the task is complete, reply DONE."
)
# Worded and ordered by measured pass rates of a 135M model: docs/results/tasks.md.
EXAMPLES = (
    Message("user", "Task: Move the file p.txt into the directory q."),
    Message("assistant", "```bash\nmv p.txt q/\n```"),
    Message("user", "Task: Run uname and write the output to u.txt."),
    Message("assistant", "```bash\nuname > u.txt\n```"),
    Message("user", "Task: Append the line abc to the file x.txt."),
    Message("assistant", "```bash\necho abc >> x.txt\n```"),
    Message("user", "exit=0 time=0.0s\n"),
    Message("assistant", "DONE"),
)
FORMAT_ERROR = "error: reply with one bash command in a ```bash block, or DONE"
_BLOCK = re.compile(r"^[ \t]*```(?:bash|sh)?[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.S | re.M)
_CLOSED = re.compile(r"^[ \t]*```", re.M)


class Reply(Value, frozen=True):
    """What a reply asks for: a command, or the end, or (neither) nothing that can be read."""

    command: str = ""
    done: bool = False


def opening(instruction: str) -> tuple[Message, ...]:
    """Messages of turn 0."""
    task = Message("user", f"Task: {instruction.strip()}")
    return (Message("system", SYSTEM), *EXAMPLES, task)


def parse(text: str, finish: FinishReason, bytes_max: int = 64 << 10) -> Reply:
    """The first fenced bash block, else DONE as last line, else nothing.

    A block that the model left open counts when it ended the reply itself; a block cut by the
    token limit does not, for half a command must not run. Nor does one that no box can run: of more
    than `bytes_max` bytes, or with a NUL.
    """
    block = _BLOCK.search(text)
    if block:
        closed = bool(_CLOSED.search(text, block.end(1)))
        if not closed and finish is not FinishReason.STOP:
            return Reply()
        command = block.group(1).strip("\n")
        fits = "\0" not in command and len(command.encode()) <= bytes_max
        return Reply(command=command) if command.strip() and fits else Reply()
    lines = [line.strip() for line in text.strip().splitlines()]
    return Reply(done=bool(lines) and lines[-1] == "DONE")


def observation(exit_code: int, wall_s: float, output: str, limit: str) -> str:
    """The user message after a step."""
    ended = f" ended by the {limit} limit" if limit != "none" else ""
    return f"exit={exit_code} time={wall_s:.1f}s{ended}\n{output.rstrip()}"


def answer(turn: TurnSeen) -> Message:
    """What the model is told after a turn."""
    if not turn.command:
        return Message("user", FORMAT_ERROR)
    return Message("user", observation(turn.exit_code, turn.wall_s, turn.output, turn.limit))
