"""One thing that an audit found."""

from __future__ import annotations

from enum import StrEnum

from muster.types import Value


class Severity(StrEnum):
    """A problem breaks a promise of Muster; a note explains."""

    PROBLEM = "problem"
    NOTE = "note"


class Finding(Value, frozen=True):
    """What, and where it stands: an episode, a group, a batch, a version or a stream."""

    severity: Severity
    what: str
    where: str


def problem(what: str, where: str) -> Finding:
    return Finding(Severity.PROBLEM, what, where)


def note(what: str, where: str) -> Finding:
    return Finding(Severity.NOTE, what, where)
