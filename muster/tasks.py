"""Ending tasks that one owns, for good.

Owns: `end`. Promise: when it returns, every task given has ended. Before Python 3.12,
`asyncio.wait_for` swallows a cancellation that meets the completion of what it waits for (CPython
issue 86296), so one `cancel()` is not enough for a task that calls libraries. (That of redis-py is
mended where it is, redis_connection.py: a time limit is a cancellation, too, and comes once.)
"""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.1


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel until all have ended; their results and errors stay with their owner."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=_AGAIN_S)
