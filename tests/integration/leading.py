"""A leader in a task of its own, which something happens to from outside.

Inside the block a call of redis-py could swallow the one cancellation by which a leader's end
reaches it (muster/tasks.py): the block would then hang until the watchdog ends the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from muster.leader import Leadership

LIMIT_S = 30.0


async def lead_while(leader: Leadership, happens: Callable[[], Awaitable[object]]) -> None:
    """Until the leader ends by itself, with its error; ends with `happens` when that fails."""
    leads = asyncio.Event()

    async def lead() -> None:
        async with leader.lead():
            leads.set()
            await asyncio.Event().wait()

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(lead(), name="leader")
        await leads.wait()
        await happens()
