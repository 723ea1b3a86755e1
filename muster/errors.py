"""The exception tree.

MusterError
├── InvalidInput        the caller sent something wrong: field, value, way out   INVALID_ARGUMENT
│   └── ConfigError     the same, in the configuration
├── NotFound            the named thing does not exist                           NOT_FOUND
├── Refused             right call, wrong time or state                          FAILED_PRECONDITION
│   └── Fenced          an older epoch than the newest seen                      ABORTED
├── Exhausted           a bound is reached                                       RESOURCE_EXHAUSTED
├── Unavailable         a part that is needed is not there now; retry            UNAVAILABLE
└── HostUnfit           this machine cannot do what was asked of it              FAILED_PRECONDITION

Each carries `field`, `value` and `way_out`, so that a message always says what to change.
Anything else that escapes is a bug and crashes the task that raised it.
"""

from __future__ import annotations

from typing import ClassVar


class MusterError(Exception):
    """Base of all expected failures. `code` is the gRPC status name."""

    code: ClassVar[str] = "UNKNOWN"

    def __init__(self, problem: str, *, field: str = "", value: object = "", way_out: str = ""):
        self.problem, self.field, self.value, self.way_out = problem, field, str(value), way_out
        super().__init__(problem)

    def __str__(self) -> str:
        where = f"{self.field} = {self.value!r}: " if self.field else ""
        out = f" → {self.way_out}" if self.way_out else ""
        return f"{where}{self.problem}{out}"


class InvalidInput(MusterError):
    """The caller sent something that can never work."""

    code = "INVALID_ARGUMENT"


class ConfigError(InvalidInput):
    """A configuration file or variable is wrong."""


class NotFound(MusterError):
    """The named thing does not exist."""

    code = "NOT_FOUND"


class Refused(MusterError):
    """A right call at the wrong time, or in the wrong state."""

    code = "FAILED_PRECONDITION"


class Fenced(Refused):
    """An older epoch than the newest seen: a former owner is talking."""

    code = "ABORTED"


class Exhausted(MusterError):
    """A bound from the configuration is reached."""

    code = "RESOURCE_EXHAUSTED"


class Unavailable(MusterError):
    """A part that is needed is not there now; a retry may find it."""

    code = "UNAVAILABLE"


class HostUnfit(MusterError):
    """This machine cannot do what was asked of it."""

    code = "FAILED_PRECONDITION"
