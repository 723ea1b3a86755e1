"""Was a box rebuilt? Recorded steps run again, observations compared.

Owns: what of a step counts as its observation, and the comparison. Promise: pure; the router's
repair and `muster replay` decide by this code alone. Measured times are no observation: they never
repeat. Does not cover: running the steps, what follows from a difference.
"""

from __future__ import annotations

from muster.types import StepLimit, Value

_SHOWN = 120


class RecordedStep(Value, frozen=True):
    """One command of an episode and what was seen of it."""

    turn: int
    command: str
    exit_code: int
    limit: StepLimit
    output: str
    timeout_s: float = 0.0  # 0: not recorded


def difference(recorded: RecordedStep, again: RecordedStep) -> str:
    """What the second run shows that the first did not; empty when nothing."""
    if again.limit is not recorded.limit:
        return f"limit {again.limit} instead of {recorded.limit}"
    if again.exit_code != recorded.exit_code:
        return f"exit {again.exit_code} instead of {recorded.exit_code}"
    if again.output != recorded.output:
        return _of_texts(recorded.output, again.output)
    return ""


def _of_texts(one: str, other: str) -> str:
    before, after = one.splitlines(), other.splitlines()
    for number, (a, b) in enumerate(zip(before, after, strict=False), start=1):
        if a != b:
            return f"line {number} of the output: {b[:_SHOWN]!r} instead of {a[:_SHOWN]!r}"
    return f"{len(after)} lines of output instead of {len(before)}"


def output_text(head: bytes, tail: bytes, total: int) -> str:
    """A step's output as it is recorded: head and tail, and how many bytes were left out."""
    left_out = total - len(head) - len(tail)
    shown = head.decode("utf-8", "replace")
    if left_out > 0:
        shown += f"\n[… {left_out} bytes left out …]\n"
    return shown + tail.decode("utf-8", "replace")
