"""Ending tasks that one owns, for good.

Owns: `end`. Promise: when it returns, every task given has ended. Before Python 3.12,
`asyncio.wait_for` (which redis-py wraps around every write) swallows a cancellation that meets the
completion of what it waits for (cpython gh-86296); one `cancel()` is therefore not enough.
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
