"""Blocking work beside the event loop.

Owns: worker threads. Promise: a caller that is cancelled goes on at once, and the process can end
at once: nobody joins the thread (`asyncio.to_thread` joins it, for as long as a model loads). What
such a thread was doing is then as if the process had been killed. Does not cover: telling the work
to stop (policy.Stop).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from muster import background

T = TypeVar("T")
_PREFIX = "trainer-work-"


async def in_daemon(work: Callable[[], T], name: str) -> T:
    """The result of `work`, which runs in a daemon thread; its exception is raised here."""
    return await background.in_daemon(work, _PREFIX + name)


async def unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T], name: str) -> T | None:
    """The result of `work`, or None as soon as `stopping` is set."""
    async with asyncio.TaskGroup() as tasks:
        doing = tasks.create_task(work, name=name)
        stopped = tasks.create_task(stopping.wait(), name=f"{name}-unless")
        await asyncio.wait((doing, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        doing.cancel()
    return None if doing.cancelled() else doing.result()


def at_work() -> bool:
    """True while a worker thread runs: the interpreter must not be torn down under it."""
    return any(thread.name.startswith(_PREFIX) for thread in threading.enumerate())
