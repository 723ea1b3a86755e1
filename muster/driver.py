"""Runs a pure machine: inbox → handle → commands as owned tasks → events.

Owns: the loop, the tasks, the journal. Promise: one event at a time reaches the machine; every
command runs as a named task of one TaskGroup; what a command returns is fed back as an event; an
exception that is not turned into an event is a bug and ends the service. The inbox is bounded, and
between two of its events whatever else is ready has its turn. Does not cover: what commands do
(each service's driver.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from muster.clock import monotonic
from muster.errors import Unavailable
from muster.journal import Journal
from muster.tasks import end

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)
C = TypeVar("C")


class Machine(Protocol[E_contra, C]):
    """A decision core: no I/O, no clock, no chance. `rules` are its whole configuration."""

    name: ClassVar[str]
    rules_type: ClassVar[Any]
    event_type: ClassVar[Any]
    tick_type: ClassVar[Any]

    def handle(self, event: E_contra, now: float) -> list[C]: ...


class MachineDriver(Generic[E, C]):
    """Feeds one machine and executes its commands."""

    def __init__(
        self,
        machine: Machine[E, C],
        execute: Callable[[C], Awaitable[E | None]],
        journal: Journal,
        *,
        inbox_max: int = 10_000,
        after: Callable[[], None] | None = None,
    ):
        self._machine, self._execute, self._journal = machine, execute, journal
        self._inbox: asyncio.Queue[tuple[E, asyncio.Future[None] | None]] = asyncio.Queue(inbox_max)
        self._applying: set[asyncio.Future[None]] = set()
        self._over = False
        self._after = after or (lambda: None)
        self._running: set[asyncio.Task[None]] = set()

    async def feed(self, event: E) -> None:
        """Hand over an event; waits while the inbox is full."""
        await self._inbox.put((event, None))

    async def apply(self, event: E) -> None:
        """Hand over an event and wait until the machine has handled it.

        Raises Unavailable when the machine stops before it has.
        """
        if self._over:
            raise _stopping()
        handled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._applying.add(handled)
        handled.add_done_callback(self._applying.discard)
        await self._inbox.put((event, handled))
        await handled

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set; running commands are then cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loop = tasks.create_task(self._loop(tasks), name=f"{self._machine.name}-machine")
                try:
                    await stopping.wait()
                finally:  # also when cancelled: one cancel may be lost on the way (muster/tasks.py)
                    await end(loop)
                    await end(*self._running)
        finally:
            self._over = True
            for waiting in list(self._applying):
                if not waiting.done():
                    waiting.set_exception(_stopping())

    async def _loop(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            event, handled = await self._inbox.get()
            now = monotonic()
            commands = self._machine.handle(event, now)
            self._journal.record(now, event, commands)
            for command in commands:
                task = tasks.create_task(self._run(command), name=type(command).__name__)
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            self._after()
            if handled is not None and not handled.done():
                handled.set_result(None)
            await asyncio.sleep(0)  # a full inbox never makes `get` wait

    async def _run(self, command: C) -> None:
        event = await self._execute(command)
        if event is not None:
            await self.feed(event)

    async def ticks(self, tick: Callable[[], E], every_s: float) -> None:
        """Feed a tick for ever, so that time is an event like any other."""
        while True:
            await asyncio.sleep(every_s)
            await self.feed(tick())


def _stopping() -> Unavailable:
    return Unavailable("the service is stopping", way_out="try again when it is back")
