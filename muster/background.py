"""Blocking work beside the event loop, in a thread that nobody has to wait for.

Owns: `in_daemon`. Promise: the loop and the process can end while the work hangs (the default
executor's threads are waited for at both ends). Does not cover: stopping the work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_daemon(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The result of `work`, or what it raised, as a future of the running loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
            future.exception()  # read here: nobody may be waiting any more
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to the waiter as it is
            failed = error
        try:
            loop.call_soon_threadsafe(settle, result, failed)
        except RuntimeError:
            return  # the loop has ended: nobody waits

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
