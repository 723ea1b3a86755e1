"""An event loop beside a program that has none: plain training loops call asynchronous code.

Owns: `LoopThread`. Promise: a call gives its result or raises what it raised, also after Ctrl-C,
which ends the call; what is entered is left again, in reverse, by the task that entered it; a
program that ends without `close` is not held up. Does not cover: fork (make it in the process that
uses it).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from muster.errors import Refused
from muster.types import Value

T = TypeVar("T")
_CLOSE_S = 30.0


class _Held(Value, frozen=True):
    context: object
    leave: asyncio.Event
    task: asyncio.Task[None]


class LoopThread:
    """One loop in one daemon thread."""

    def __init__(self, name: str = "muster-loop") -> None:
        self._started = threading.Event()
        self._held: list[_Held] = []
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Event
        self._tasks: asyncio.TaskGroup
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name=name, daemon=True
        )
        self._thread.start()
        self._started.wait()

    async def _main(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        async with asyncio.TaskGroup() as self._tasks:
            self._started.set()
            await self._closing.wait()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """The result of `work`, which runs on the loop. Never called from the loop itself.

        Raises Refused after `close`.
        """
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            work.close()
            raise Refused("this client is closed", way_out="call it within its `with` block")
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return asked.result(timeout_s)
        finally:
            asked.cancel()  # after Ctrl-C: else it went on, and its effect came unasked

    def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """What the context gives; `leave` leaves it, or `close`."""
        return self.call(self._enter(context))

    def leave(self, context: object) -> None:
        """Leave one that was entered; one that is left already is let be."""
        if self._thread.is_alive():
            self.call(self._leave(context), _CLOSE_S)

    def close(self) -> None:
        """Leave what was entered; the loop ends. Raises what leaving raised first."""
        if not self._thread.is_alive():
            return
        try:
            self.call(self._leave_all(), _CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_CLOSE_S)

    async def _enter(self, context: AbstractAsyncContextManager[T]) -> T:
        opened: asyncio.Future[T] = self._loop.create_future()
        leave = asyncio.Event()
        holding = self._hold(context, opened, leave)
        held = _Held(context, leave, self._tasks.create_task(holding, name="hold"))
        try:
            value = await opened
        except asyncio.CancelledError:
            leave.set()  # once it is open
            raise
        self._held.append(held)
        return value

    async def _hold(
        self,
        context: AbstractAsyncContextManager[T],
        opened: asyncio.Future[T],
        leave: asyncio.Event,
    ) -> None:
        try:
            async with context as value:
                if not opened.cancelled():
                    opened.set_result(value)
                await leave.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def _leave_all(self) -> None:
        while self._held:
            await self._leave(self._held[-1].context)

    async def _leave(self, context: object) -> None:
        for held in [held for held in self._held if held.context is context]:
            self._held.remove(held)
            held.leave.set()
            await held.task
