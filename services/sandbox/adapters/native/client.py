"""The keeper as the service sees it: another process, asked one thing at a time, in order.

Owns: the queue in front of it. Promise: a keeper that a former service of the same folder left is
taken over, else one is started; a request that waits too long for its turn fails alone; one that
has begun is carried through whether its caller still waits or not, so question and answer never
get out of step; a keeper that dies, does not answer or works for another service now ends
`serving` with Unavailable, and with it the service: nothing can be known about its boxes any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster import telemetry
from muster.clock import monotonic
from muster.errors import HostUnfit, Unavailable
from services.sandbox.adapters.native import reach
from services.sandbox.adapters.native.channel import Channel, Late
from services.sandbox.box import BoxFailure

_log = telemetry.logger("muster.sandbox")
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

    def __init__(self, request: dict[str, Any], blob: bytes, fd: int):
        self.request, self.blob, self.fd, self.begun = request, blob, fd, asyncio.Event()
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def settle(self, result: Answer | BoxFailure) -> None:
        if self.answer.done():
            return
        if isinstance(result, BoxFailure):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


class KeeperProcess:
    """The keeper of a runtime folder; `orphan_s`: how long it goes on when we are gone."""

    def __init__(self, runtime_dir: Path, instance: str, patience: Patience, orphan_s: float):
        self._dir, self._instance, self._orphan_s = runtime_dir, instance, orphan_s
        self._patience = patience
        self._queue: asyncio.Queue[_Asked] = asyncio.Queue(_QUEUE_MAX)
        self.tells_stall = self.limits_cpu = False
        self._lost = ""  # why nothing can be asked any more
        self._hung = False
        self._ended = asyncio.Event()
        self._epoch = ""  # until it has greeted us

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> int:
        """Wait until it can make boxes; how many leftover groups it swept. Raises HostUnfit."""
        found = await reach.take_over(self._dir, self._orphan_s)
        if found is None:
            found = reach.start(self._dir, self._instance, self._orphan_s)
        else:
            _log.info("the keeper of a former service goes on, with the boxes that it keeps")
        self._process, self._channel = found.process, Channel(found.end)
        try:
            first = found.first or await self._channel.receive(_READY_WAIT_S)
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
        self._epoch = str(first["epoch"])
        self.tells_stall, self.limits_cpu = bool(first["stall"]), bool(first["cpu"])
        if not self.tells_stall:
            _log.warning(
                "this kernel tells no pressure stall per control group (CONFIG_PSI, psi=1): a step "
                "that a busy host starved cannot be told from a slow one"
            )
        return int(first.get("swept", 0))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Requests are answered within the block; it ends with Unavailable when the keeper does."""
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                work = (self._pump(), self._watch(), self._beat())
                mine = [tasks.create_task(each) for each in work]
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

    async def ask(self, request: dict[str, Any], blob: bytes = b"", fd: int = -1) -> Answer:
        """One request; raises BoxFailure with the keeper's words. `fd` stays the caller's."""
        asked = _Asked(request, blob, fd)
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

    async def ask_until_done(self, request: dict[str, Any], fd: int = -1) -> Answer:
        """The same for what ends processes: asked again while the answer is `pending`."""
        pause, longest = _PAUSE_S
        deadline = monotonic() + self._patience.end_s
        while True:
            answer, blob = await self.ask(request, fd=fd)
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
                        asked.request, asked.blob, wait_s=self._patience.answer_s, fd=asked.fd
                    )
                )
        except BoxFailure as failure:
            self._lost, self._hung = f"{_GONE}: {failure}", isinstance(failure, Late)
            self._ended.set()
        finally:
            self._lost = self._lost or "this sandbox host stops"
            waiting = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
            for each in [asked, *waiting] if asked else waiting:
                each.begun.set()
                each.settle(BoxFailure(self._lost))

    async def _beat(self) -> None:
        """Be heard of, so that no other service takes over; nothing is answered to it."""
        while True:
            await asyncio.sleep(reach.BEAT_S)
            if not self._channel.mention({"op": "beat"}):
                self._ended.set()

    async def _watch(self) -> None:
        """Raise Unavailable when the keeper ends, be it asked something at that time or not."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process.handle, self._ended.set)
        try:
            await self._ended.wait()
        finally:
            loop.remove_reader(self._process.handle)
        status = self._process.ended()
        if status:
            self._lost = f"{_GONE}: {status}"
        self._lost = self._lost or f"{_GONE}: it works for another service now"
        _log.error("%s; this sandbox host ends, and its boxes have", self._lost)
        raise Unavailable(self._lost, way_out="start the sandbox again: it sweeps what is left")

    async def stop(self) -> None:
        """Let it end every box and itself; one that does not answer is killed, and its boxes."""
        self._channel.close()
        ends = True
        if self._hung:
            self._process.kill()
        elif self._epoch:
            ends = await reach.say_stop(self._dir, self._epoch, self._patience.stop_s)
        if ends and not await asyncio.to_thread(self._process.wait, self._patience.stop_s):
            # It goes on without us, as after a SIGKILL of the service.
            _log.warning("boxes still end after %g s; their keeper goes on", self._patience.stop_s)
        self._process.close()
