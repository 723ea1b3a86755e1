"""The trainer's patience with what is away: the bank, Redis, the folder of checkpoints.

Owns: `retried`. Promise: muster/patience.py's. Does not cover: a call that never ends (each has its
deadline).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import TypeVar

from muster.patience import patiently

T = TypeVar("T")
STEP_MAX_S = 5.0
_ANSWERED_S = 60.0  # longer than any call takes that only waits for who does not answer


async def retried(
    what: str,
    call: Callable[[], Awaitable[T]],
    *,
    retry_s: float,
    first_s: float,
    long: bool = False,
) -> T:
    """What `call` answers; waits `first_s` before the second try, and twice as long each time.

    long: the call lasts while all is well, as a lease does: one that fails late was answered until
    then, and the patience begins anew. Raises Unavailable when `what` has been away for `retry_s`.
    """
    return await patiently(
        what,
        call,
        patience_s=retry_s,
        first_s=first_s,
        most_s=STEP_MAX_S,
        anew_s=_ANSWERED_S if long else inf,
        field="trainer.retry_s",
        way_out="start it; the trainer goes on from its checkpoint",
    )
