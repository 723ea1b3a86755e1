"""Patience with what is away: Redis, the bank, the folder of checkpoints.

Owns: `patiently`. Promise: only Unavailable is tried again, so the call must be idempotent; nobody
waits past the patience; the log tells every wait and its end, with `awaited`, `wait` (its number)
and `over` (whether it came back), for those who show them to people (supervise/troubles.py). Does
not cover: a call that never ends (each has its deadline).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from math import inf
from typing import TypeVar

from muster import telemetry
from muster.clock import monotonic
from muster.errors import Unavailable

T = TypeVar("T")
_numbers = itertools.count(1)
_log = telemetry.logger("patience")


async def patiently(
    what: str,
    call: Callable[[], Awaitable[T]],
    *,
    patience_s: float,
    first_s: float = 0.2,
    most_s: float = 5.0,
    anew_s: float = inf,
    field: str = "",
    way_out: str = "start it again",
) -> T:
    """What `call` answers; waits `first_s` before the second try, then twice as long each time, at
    most `most_s`. A call that lasted longer than `anew_s` was answered until then: the patience
    begins anew. Only for calls that last while all is well: others may fail late, too.

    Raises Unavailable, naming the setting `field`, when `what` has been away for `patience_s`, from
    the end of the first try that failed;
    `way_out` is for errors that know none.
    """
    gone: float | None = None  # when a try failed first
    wait, told, number, back = first_s, False, next(_numbers), False
    try:
        while True:
            asked = monotonic()
            try:
                answer = await call()
                back = True
                return answer
            except Unavailable as error:
                now = monotonic()
                if gone is None or now - asked > anew_s:
                    gone, wait = now, first_s
                if now - gone + wait > patience_s:
                    raise Unavailable(
                        f"{what} has been away for {now - gone:.0f} s ({error.problem})",
                        field=field or error.field,
                        value=patience_s if field else error.value,
                        way_out=error.way_out or way_out,
                    ) from error
                text, told = f"{what} is away: {error}", True
                more = {"awaited": what, "wait": number, "trying_again_in_s": round(wait, 3)}
                _log.warning("%s", text, extra=more)
            await asyncio.sleep(wait)
            wait = min(2 * wait, most_s)
    finally:
        if told and gone is not None:
            more = {"awaited": what, "wait": number, "over": back}
            _log.warning("%s was awaited for %.1f s", what, monotonic() - gone, extra=more)
