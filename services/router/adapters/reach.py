"""Calls that may not arrive: repeated, or given up, and what a failure says of the other side.

Owns: the repeat of keyed calls, how long a host may be away, what a failed call tells of its box.
Promise: a failure is never taken for more than it shows; a host whose service went away may come
back with the same boxes, at another address, before any of them counts as lost; one that was told
to stop, or that does not know the box, is believed at once. Does not cover: the calls (calls.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from muster import rpc, telemetry
from muster.clock import monotonic
from muster.errors import MusterError, NotFound, Unavailable
from services.router import events as e

R = TypeVar("R")
_log = telemetry.logger("router.calls")
_PAUSE_S, _PAUSE_MAX_S = 0.2, 1.0
_CUT_MAX = 2  # calls in a row under which the line to a peer that is there broke
_LIVES_MAX = 5  # times that a peer may go away under one call


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
    """The same of a verification. A host that does not answer is asked once more first.

    Unless it was waited for already, or has said that it stops.
    """
    if isinstance(error, Unavailable):
        gone = isinstance(error, DiedInFlight) or not reached(error)
        return e.Loss.BOX_GONE if gone else e.Loss.BOX_KILLED
    return e.Loss.BOX_GONE if loss_of(error) is not e.Loss.UNKNOWN else e.Loss.UNKNOWN


# Of a line, as gRPC and rpc.calling tell it; a channel to an address that was left is closed here.
_BROKEN = ("UNAVAILABLE: ", "CANCELLED: ", "closed on this side", "Channel is closed")
_STOPS = "host.state"  # the field by which a host says that it was told to stop
_FINAL = (_STOPS, "verifier")  # a peer's own word that a repeat of the same call changes nothing
# A host that was told to stop (its own word), a peer that is not announced (ours).
_NOT_BY_THE_COMMAND = (_STOPS, "address")


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


def cut(error: Unavailable) -> bool:
    """True when the line broke under a call: whoever had taken it may have ended."""
    return reached(error) and any(words in str(error) for words in _BROKEN)


class Line:
    """What the failed calls of one key showed so far."""

    def __init__(self, away_s: float, silent_max: int):
        self._away_s, self._silent_max = away_s, silent_max
        self._until: float | None = None  # till when its peer may stay away
        self._silent = self._lives = 0
        self._in_flight = False  # a call reached the peer
        self._away_first = False  # … which was away before: its box may have gone then
        self._died = False  # … and its process ended then
        self._errors: list[Unavailable] = []

    def failed(self, error: Unavailable, now: float) -> bool:
        """Take one more failure; False when it was the last."""
        first, self._errors = not self._errors, [*self._errors[:1], error]
        self._away_first = self._away_first or (first and not reached(error))
        if error.field in _FINAL:
            return False
        if reached(error):
            self._in_flight, self._until = True, None
            self._silent += 1
            return self._silent < (_CUT_MAX if cut(error) else self._silent_max)
        self._died = self._died or (self._in_flight and died(error))
        if self._until is None:  # it went away just now
            self._until, self._silent = now + self._away_s, 0
            self._lives += 1
        return first or (now < self._until and self._lives <= _LIVES_MAX)

    def verdict(self, last: MusterError) -> MusterError:
        """What the whole says: of a peer that ended with the call, that; else the last failure."""
        final = isinstance(last, Unavailable) and last.field in _FINAL
        if not self._died or self._away_first or final:
            return last
        return DiedInFlight(f"{self._errors[0]}; then: {last}")


async def keyed(
    call: Callable[[], Awaitable[R]], what: str, away_s: float = 0.0, silent_max: int = 2
) -> R:
    """A keyed call, repeated while its peer is away and once more when it brought no answer.

    away_s: how long the peer may stay away (seconds); `call` finds its newest address each time.
    silent_max: calls whose deadline may pass, this one included.
    Raises DiedInFlight when the first call that failed had reached its peer, its process has ended
    since, and either nobody took its place in time or who did has no such box; what the last call
    met otherwise.
    """
    line, pause_s = Line(away_s, silent_max), _PAUSE_S
    while True:
        try:
            with rpc.calling(what):
                return await call()
        except NotFound as error:
            if loss_of(error) is e.Loss.BOX_GONE:
                raise line.verdict(error) from error
            raise
        except Unavailable as error:
            if not line.failed(error, monotonic()):
                raise line.verdict(error) from error
            _log.info("%s is repeated: %s", what, error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


async def begun(call: Callable[[], Awaitable[R]], what: str, away_s: float = 0.0) -> R:
    """A call that another peer could answer as well: repeated only when the line broke under it."""
    try:
        with rpc.calling(what):
            return await call()
    except Unavailable as error:
        if not away_s or not cut(error):
            raise
    await asyncio.sleep(_PAUSE_S)
    return await keyed(call, what, away_s)


async def best_effort(call: Callable[[], Awaitable[object]], away_s: float = 0.0) -> None:
    """A clean-up whose failure the other side makes good by itself; with `away_s` it is keyed."""
    try:
        if away_s:
            await keyed(call, "clean-up", away_s)
            return
        with rpc.calling("clean-up"):
            await call()
    except MusterError as error:
        _log.info("clean-up call failed: %s", error)
