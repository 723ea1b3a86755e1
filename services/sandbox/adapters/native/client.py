"""The keeper as the service sees it: a child process, asked one thing at a time, in order.

Owns: the queue in front of it. Promise: a request that waits too long for its turn fails alone;
one that has begun is carried through whether its caller still waits or not, so question and
answer never get out of step; a keeper that dies or does not answer ends `serving` with
Unavailable, and with it the service: nothing can be known about its boxes any more, and a new
keeper sweeps what is left of them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import services
from muster import telemetry
from muster.clock import monotonic
from muster.errors import HostUnfit, Unavailable
from services.sandbox.adapters.native.channel import Channel
from services.sandbox.box import BoxFailure

_log = telemetry.logger("muster.sandbox")
_START = "from services.sandbox.adapters.native.keeper import main; import sys; "
_READY_WAIT_S = 30.0
_QUEUE_MAX = 16384  # several requests for each of the 4096 boxes that a host may have
_PAUSE_S = (0.005, 0.1)  # between two questions whether a box has ended: first, longest
_GONE = "the keeper of the boxes has gone"

Answer = tuple[dict[str, Any], bytes]


@dataclass
class Patience:
    """How long, in seconds."""

    turn_s: float = 20.0  # a request waits for its turn
    answer_s: float = 30.0  # the keeper takes for one request; longer, and it counts as hung
    end_s: float = 30.0  # the processes of a box take to end
    stop_s: float = 30.0  # the keeper may take to end all boxes before it is left alone with it


class _Asked:
    """A request in the queue; `answer` is cancelled when its caller has gone."""

    def __init__(self, request: dict[str, Any], fd: int):
        self.request, self.fd, self.begun = request, fd, asyncio.Event()
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def settle(self, result: Answer | BoxFailure) -> None:
        if self.answer.done():
            return
        if isinstance(result, BoxFailure):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


class KeeperProcess:
    """The keeper as a child process of the service."""

    def __init__(self, runtime_dir: Path, instance: str, patience: Patience):
        own, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        root = Path(services.__file__).resolve().parent.parent
        call = f"main({str(runtime_dir)!r}, {instance!r}, {theirs.fileno()})"
        code = f"import sys; sys.path.insert(0, {str(root)!r}); {_START}{call}"
        # -I -S: no site-packages, nothing from the environment; it starts in about 30 ms.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            cwd="/",
            env={},
        )
        theirs.close()
        self._channel, self._patience = Channel(own), patience
        self._queue: asyncio.Queue[_Asked] = asyncio.Queue(_QUEUE_MAX)
        self.tells_stall = False
        self._lost = ""  # why nothing can be asked any more
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> int:
        """Wait until it can make boxes; how many leftover groups it swept. Raises HostUnfit."""
        try:
            first = await self._channel.receive(_READY_WAIT_S)
        except BoxFailure as error:
            await self.stop()
            raise HostUnfit(
                f"the keeper of the boxes did not start: {error}", way_out="see its lines above"
            ) from error
        if "error" in first:
            await self.stop()
            raise HostUnfit(
                f"this host cannot isolate boxes: {first['error']}", way_out=str(first["way_out"])
            )
        self.tells_stall = bool(first["stall"])
        if not self.tells_stall:
            _log.warning(
                "this kernel tells no pressure stall per control group (CONFIG_PSI, psi=1): a step "
                "that a busy host starved cannot be told from a slow one"
            )
        return int(first["swept"])

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Requests are answered within the block; it ends with Unavailable when the keeper does."""
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                mine = [tasks.create_task(self._pump()), tasks.create_task(self._watch())]
                try:
                    yield
                except Exception as error:  # noqa: BLE001 - raised below, outside of the group
                    failure = error
                finally:
                    for task in mine:
                        task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from failure
        finally:
            await self.stop()  # outside: the group may cancel us until its very end
        if failure is not None:
            raise failure

    async def ask(self, request: dict[str, Any], fd: int = -1) -> Answer:
        """One request; raises BoxFailure with the keeper's words. `fd` stays the caller's."""
        asked = _Asked(request, fd)
        try:
            if self._lost:
                raise BoxFailure(self._lost)
            self._queue.put_nowait(asked)
            async with asyncio.timeout(self._patience.turn_s):
                await asked.begun.wait()
        except asyncio.QueueFull:
            raise BoxFailure(f"{_QUEUE_MAX} requests wait for the keeper already") from None
        except TimeoutError:
            if not asked.begun.is_set():
                asked.answer.cancel()
                problem = f"the keeper was busy for {self._patience.turn_s:g} s"
                raise BoxFailure(problem) from None
        except BaseException:
            asked.answer.cancel()
            raise
        answer, blob = await asked.answer
        if "error" in answer:
            raise BoxFailure(str(answer["error"])[:2000])
        return answer, blob

    async def ask_until_done(self, request: dict[str, Any]) -> Answer:
        """The same for what ends processes: asked again while the answer is `pending`."""
        pause, longest = _PAUSE_S
        deadline = monotonic() + self._patience.end_s
        while True:
            answer, blob = await self.ask(request)
            if not answer.get("pending"):
                return answer, blob
            if monotonic() > deadline:
                raise BoxFailure(f"processes did not end in {self._patience.end_s:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _pump(self) -> None:
        """Carry requests to the keeper, one after the other, until it fails or we are cancelled."""
        asked: _Asked | None = None
        try:
            while True:
                asked = await self._queue.get()
                if asked.answer.cancelled():
                    continue
                asked.begun.set()
                asked.settle(
                    await self._channel.call(
                        asked.request, wait_s=self._patience.answer_s, fd=asked.fd
                    )
                )
        except BoxFailure as failure:
            self._lost = f"{_GONE}: {failure}"
            self._ended.set()
        finally:
            self._lost = self._lost or "this sandbox host stops"
            waiting = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
            for each in [asked, *waiting] if asked else waiting:
                each.begun.set()
                each.settle(BoxFailure(self._lost))

    async def _watch(self) -> None:
        """Raise Unavailable when the keeper ends, be it asked something at that time or not."""
        loop = asyncio.get_running_loop()
        handle = os.pidfd_open(self._process.pid)
        loop.add_reader(handle, self._ended.set)
        try:
            await self._ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        status = self._process.poll()
        if status is not None:
            self._lost = f"{_GONE}: it ended with status {status}"
        _log.error("%s; this sandbox host ends, and its boxes have", self._lost)
        raise Unavailable(self._lost, way_out="start the sandbox again: it sweeps what is left")

    async def stop(self) -> None:
        """Let it end every box and itself; one that does not answer is killed, and its boxes."""
        self._channel.close()
        if self._lost.startswith(_GONE):
            self._process.kill()
        try:
            await asyncio.to_thread(self._process.wait, self._patience.stop_s)
        except subprocess.TimeoutExpired:
            # It goes on without us, as after a SIGKILL of the service.
            _log.warning("boxes still end after %g s; their keeper goes on", self._patience.stop_s)
