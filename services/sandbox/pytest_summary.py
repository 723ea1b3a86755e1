"""The verdict of Terminal-Bench 1: what pytest's short test summary says. Pure.

Promise: 1 only when the last summary is whole (its counts agree with its lines and nothing stands
after them), lists at least one test, and no summary in the output names a failure; 0 when one
does; else there is no verdict. So text that the agent's programs print before, between or after
the summaries of the verifier adds failures at most, or spoils the verdict. Does not cover: a
verifier that runs the agent's code in pytest's own process, or as a user who can reach it: such
code can end pytest and print a summary in its place.
"""

from __future__ import annotations

import re
from collections import Counter

from muster.types import Value
from services.sandbox.box import Evidence

# What should be kept of a verifier's output: some thousand lines of tests, and what their programs
# print. Of a longer one only the tail is looked at, half of it.
OUTPUT_BYTES = 256 << 10

_HEADER = re.compile(r"=*\s*short test summary info\s*=*", re.IGNORECASE)
_TEST = re.compile(r"(PASSED|XFAIL|FAILED|ERROR|XPASS) (?=\S)|(SKIPPED) \[(\d+)\] |(SUBFAILED)\b")
_FAILING = {"FAILED", "ERROR", "XPASS", "SUBFAILED"}
_COUNTS = re.compile(
    r"=*\s*(\d+ [a-z][a-z ]*(?:, \d+ [a-z][a-z ]*)*) in [\d.]+s(?: \(\d+:\d\d:\d\d\))?\s*=*"
)
_PASSING = {"passed": "PASSED", "xfailed": "XFAIL", "skipped": "SKIPPED"}
_NOT_PASSING = ("failed", "error", "errors", "xpassed", "subtests failed")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE_MAX = 4096  # characters of a line that are looked at


class Summary(Value, frozen=True):
    """1 or 0; or None, with what is wrong: "pytest's summary " and `problem`."""

    reward: float | None
    problem: str = ""


def read(evidence: Evidence) -> Summary | None:
    """The summary in what was kept of the output; None when there is none."""
    lines = _lines(evidence)
    headers = [at for at, line in enumerate(lines) if _HEADER.fullmatch(line)]
    if not headers:
        return None
    # From the first header on: a summary that is printed behind the real one hides no failure.
    if any(_status(line) in _FAILING for line in lines[headers[0] + 1 :]):
        return Summary(0.0)
    return _last(lines[headers[-1] + 1 :])


def _last(lines: list[str]) -> Summary:
    """The last summary, in which no line is a failure."""
    ended = _COUNTS.fullmatch(lines[-1]) if lines else None
    if ended is None:
        behind = lines[-1][:80] if lines else ""
        return Summary(
            None,
            "is cut short, or something stands behind its last line: let pytest be the last that "
            f"prints, not {behind!r}",
        )
    counts, listed = Counter[str](), Counter[str]()
    for part in ended.group(1).split(", "):
        number, _, name = part.partition(" ")
        counts[name] += int(number)
    if any(counts[name] for name in _NOT_PASSING):
        return Summary(0.0)
    for line in lines:
        if test := _TEST.match(line):
            listed[_status(line)] += int(test.group(3) or 1)
    if any(listed[status] != counts[name] for name, status in _PASSING.items()):
        return Summary(None, "does not list what it counts: run pytest -rA")
    if not listed:
        return Summary(None, "is empty")
    return Summary(1.0)


def _status(line: str) -> str:
    """The word that begins a line about one test (about several, when skipped); else nothing."""
    test = _TEST.match(line)
    return (test.group(1) or test.group(2) or test.group(4)) if test else ""


def _lines(evidence: Evidence) -> list[str]:
    """The lines to look at, without the empty ones."""
    if evidence.total > len(evidence.head) + len(evidence.tail):
        data = evidence.tail.partition(b"\n")[2]  # its first line is not whole
    else:
        data = evidence.head + evidence.tail
    text = _COLOUR.sub("", data.decode("utf-8", "replace").replace("\r", ""))
    lines = (line[:_LINE_MAX].rstrip() for line in text.split("\n"))
    return [line for line in lines if line]
