"""From what a verifier left to a verdict. Pure.

Promise: a reward is a finite number in [0, 1] that the verifier itself wrote, or there is none;
nothing is guessed from an exit code. `reward.json` (a flat object) stands before `reward.txt`; a
task of Terminal-Bench 1 has neither, but pytest's summary (pytest_summary.py). Does not cover:
what a verdict means for the attempt (muster/outcome.py).
"""

from __future__ import annotations

import json
import math
import re

from muster.types import Value, VerdictStatus
from services.sandbox import pytest_summary
from services.sandbox.box import Evidence, Judgement

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\Z")
_SHOWN = 80


class Verdict(Value, frozen=True):
    """The verdict and, for people, what was found."""

    status: VerdictStatus
    reward: float = 0.0
    detail: str = ""


def read(judgement: Judgement, kind: str = "files") -> Verdict:
    """The verdict of a task whose `Task.verdict` is `kind`: "files" or "pytest".

    Time limit first: what a verifier wrote before it hung counts for nothing.

    A verifier that ends with 126 or 127 (the shell's words for "cannot run it", "not found") and
    leaves no verdict counts as a set-up that failed, which is nobody's score: test.sh missed a
    tool. The same codes come out of a test.sh whose last command was the agent's program, absent
    or not executable. So a task's author must always write a verdict, and 0 first of all:
    `echo 0 > /logs/verifier/reward.txt` as the first line (docs/tasks.md).
    """
    evidence = judgement.evidence
    if evidence.broken:
        return Verdict(VerdictStatus.SETUP_FAILED, detail=f"verifier: {evidence.broken}")
    if evidence.timed_out:
        # Also where a verdict is there: it may have been written before the work was done.
        detail = (
            f"ended by its time limit after {evidence.wall_s:.1f} s: what it wrote is no verdict"
        )
        return Verdict(VerdictStatus.TIMEOUT, detail=detail)
    if kind == "pytest":
        found, script, missing = _from_pytest(evidence), "run-tests.sh", "printed no pytest summary"
    else:
        found, script, missing = _from_files(judgement), "test.sh", "left no verdict"
    if found is not None:
        return found
    if evidence.exit_code in (126, 127):
        detail = f"{script} could not run something (exit {evidence.exit_code}) and {missing}"
        return Verdict(VerdictStatus.SETUP_FAILED, detail=detail)
    way_out = "run pytest -rA, last" if kind == "pytest" else "write /logs/verifier/reward.txt"
    detail = f"{script} ended with {evidence.exit_code} and {missing}; {way_out}"
    return Verdict(VerdictStatus.INVALID, detail=detail)


def _from_files(judgement: Judgement) -> Verdict | None:
    """What the verdict files say; None when there is none."""
    for name, reader in (("reward.json", _from_json), ("reward.txt", _from_text)):
        if name in judgement.files:
            return _checked(name, judgement.files[name], reader(judgement.files[name]))
        problem = judgement.problems.get(name, "absent")
        if problem != "absent":
            return Verdict(VerdictStatus.INVALID, detail=f"{name}: {problem}")
    return None


def _from_pytest(evidence: Evidence) -> Verdict | None:
    """What pytest's summary says; None when there is none."""
    summary = pytest_summary.read(evidence)
    if summary is None:
        return None
    if summary.reward is None:
        return Verdict(VerdictStatus.INVALID, detail=f"pytest's summary {summary.problem}")
    return Verdict(VerdictStatus.REWARDED, summary.reward)


def _checked(name: str, data: bytes, reward: float | None) -> Verdict:
    shown = data[:_SHOWN].decode("utf-8", "replace")
    if reward is None:
        return Verdict(VerdictStatus.INVALID, detail=f"{name} holds no reward: {shown!r}")
    if not math.isfinite(reward) or not 0.0 <= reward <= 1.0:
        detail = f"{name}: a reward has to be a finite number from 0 to 1, not {shown!r}"
        return Verdict(VerdictStatus.INVALID, detail=detail)
    return Verdict(VerdictStatus.REWARDED, reward)


def _from_json(data: bytes) -> float | None:
    try:
        found = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or any(isinstance(v, (dict, list)) for v in found.values()):
        return None  # not flat
    value = found.get("reward", next(iter(found.values())) if len(found) == 1 else None)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object whose keys differ: a second `reward` was smuggled in by something printed."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _from_text(data: bytes) -> float | None:
    text = data.decode("utf-8", "replace").strip()
    if text.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(text)
    return float(text) if _NUMBER.match(text) else None
