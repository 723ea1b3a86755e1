"""Patience with what is away: the bank, Redis, the folder of checkpoints.

Owns: `retried`. Promise: only Unavailable is tried again; a call that lasted for long was answered
until then, so the patience begins anew. Does not cover: a call that never ends (each has its
deadline).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from muster import telemetry
from muster.clock import monotonic
from muster.errors import Unavailable

T = TypeVar("T")
STEP_MAX_S = 5.0
_log = telemetry.logger("trainer.retry")


async def retried(
    what: str, call: Callable[[], Awaitable[T]], *, retry_s: float, first_s: float
) -> T:
    """What `call` answers; waits `first_s` before the second try, and twice as long each time.

    Raises Unavailable when `what` has been away for `retry_s`.
    """
    gone, wait = monotonic(), first_s
    while True:
        asked = monotonic()
        try:
            return await call()
        except Unavailable as error:
            now = monotonic()
            if now - asked > STEP_MAX_S:
                gone, wait = now, first_s
            if now - gone + wait > retry_s:
                raise Unavailable(
                    f"{what} has been away for {now - gone:.0f} s ({error.problem})",
                    field="trainer.retry_s",
                    value=retry_s,
                    way_out=error.way_out or "start it; the trainer goes on from its checkpoint",
                ) from error
            _log.warning("%s is away, trying again in %.1f s: %s", what, wait, error)
        await asyncio.sleep(wait)
        wait = min(2 * wait, STEP_MAX_S)
