"""Calls that may not arrive: asked twice, or given up, and what a failure says of the other side.

Owns: the repeat of keyed calls, what a failed one tells of its box. Promise: a failure is never
taken for more than it shows. Does not cover: the calls themselves (calls.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from muster import rpc, telemetry
from muster.errors import MusterError, NotFound, Unavailable
from services.router import events as e

R = TypeVar("R")
_log = telemetry.logger("router.calls")


class DiedInFlight(Unavailable):
    """The call was under way when its peer's process ended; what it did is not known."""


def loss_of(error: MusterError) -> e.Loss:
    """What a failed step says of its box. The one sign of a lost box is NotFound of field `box`."""
    if isinstance(error, NotFound):
        if error.field != "box":
            return e.Loss.UNKNOWN
        # A host names the box that it does not know, and none when it went with the step.
        return e.Loss.BOX_GONE if error.value else e.Loss.BOX_KILLED
    if isinstance(error, DiedInFlight):
        return e.Loss.BOX_KILLED
    return e.Loss.BOX_GONE if isinstance(error, Unavailable) else e.Loss.UNKNOWN


def loss_at_verdict(error: MusterError) -> e.Loss:
    """The same of a verification. A host that does not answer is asked once more first."""
    if isinstance(error, Unavailable):
        return e.Loss.BOX_KILLED
    return e.Loss.BOX_GONE if loss_of(error) is not e.Loss.UNKNOWN else e.Loss.UNKNOWN


# A host that was told to stop (its own word), a peer that is not announced (ours).
_NOT_BY_THE_COMMAND = ("host.state", "address")


def reached(error: Unavailable) -> bool:
    """False when the command cannot have taken its peer with it.

    Nobody listens there, it has left, or it was told to stop.
    """
    left = error.field in _NOT_BY_THE_COMMAND
    return not left and "failed to connect" not in str(error).lower()


def died(error: Unavailable) -> bool:
    """True when a process that took a call before has ended: its kernel refuses the connection.

    A line that is cut, or a host that is stuck, looks otherwise: as silence.
    """
    return "connection refused" in str(error).lower()


async def twice(call: Callable[[], Awaitable[R]], what: str) -> R:
    """A keyed call, repeated once when its answer was lost.

    Raises DiedInFlight when the first one had reached its peer and the second finds that it has
    ended; what the second call met when that is not known.
    """
    try:
        with rpc.calling(what):
            return await call()
    except Unavailable as error:
        first = error
    await asyncio.sleep(0.2)
    try:
        with rpc.calling(what):
            return await call()
    except Unavailable as error:
        if reached(first) and died(error):
            raise DiedInFlight(f"{first}; then: {error}") from error
        raise


async def best_effort(call: Callable[[], Awaitable[object]]) -> None:
    """A clean-up whose failure the other side makes good by itself."""
    try:
        with rpc.calling("clean-up"):
            await call()
    except MusterError as error:
        _log.info("clean-up call failed: %s", error)
