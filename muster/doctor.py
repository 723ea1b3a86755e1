"""What `muster doctor` says of a deployment: one check, one line, one fix.

Pure. Owns: the form of a check, the order in which they are told. Promise: whatever is a problem
has a way out. Does not cover: the rules (doctor_redis, doctor_fleet, doctor_machine), looking
(doctor_look).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from muster.types import Value


class Status(StrEnum):
    """A problem has to be mended; a note is worth knowing; unseen could not be looked at."""

    OK = "ok"
    NOTE = "note"
    UNSEEN = "unseen"
    PROBLEM = "problem"


class Check(Value, frozen=True):
    """name: what was looked at, always the same words (`redis.durability`). way_out: the fix."""

    name: str
    status: Status
    what: str
    way_out: str = ""


def ok(name: str, what: str) -> Check:
    return Check(name, Status.OK, what)


def note(name: str, what: str, way_out: str = "") -> Check:
    return Check(name, Status.NOTE, what, way_out)


def unseen(name: str, what: str, way_out: str = "") -> Check:
    return Check(name, Status.UNSEEN, what, way_out)


def problem(name: str, what: str, way_out: str) -> Check:
    assert way_out, f"{name}: a problem without a fix"
    return Check(name, Status.PROBLEM, what, way_out)


def problems(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if check.status is Status.PROBLEM]


def lines(checks: Sequence[Check]) -> list[str]:
    """For people: what is well first, problems last, each with its fix below; then the sum."""
    order = list(Status)
    told: list[str] = []
    for check in sorted(checks, key=lambda c: order.index(c.status)):
        told.append(f"{check.status:8}{check.name}: {check.what}")
        if check.way_out:
            told.append(f"        → {check.way_out}")
    bad = len(problems(checks))
    told.append(f"{bad} problem{'s' * (bad != 1)}" if bad else "no problem found")
    return told
