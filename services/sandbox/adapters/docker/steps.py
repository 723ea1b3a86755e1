"""One step in a container: begun, drained, held to its limits, ended, and told.

Owns: the time limit, the disk limit where the storage driver has none, and the end of a step's
processes. Promise: the answer comes when the shell has ended; output is drained and kept within
bounds; at a limit every process that began with the step or after it ends. That is asked of the
container's own bash, which an agent may have spoiled, so the engine or the kernel counts what is
left; a container in which something survives is Unkillable, and its end is the caller's to make.
Does not cover: what carries a session over (backend.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiodocker import DockerError
from aiodocker.stream import Stream

from muster.clock import monotonic
from muster.types import Limits
from services.sandbox.adapters.docker import shell
from services.sandbox.adapters.docker.counters import Counts, Groups
from services.sandbox.adapters.docker.engine import Engine, EngineTrouble
from services.sandbox.adapters.docker.shell import Control, Session, Until
from services.sandbox.adapters.native.spool import Spool
from services.sandbox.box import Evidence

PIDS_RESERVE = 10  # PID 1, the script around a step and its drains
_PIDS_TO_KILL = 64  # what the engine needs to begin a process in a full container
_KILL_S = 10.0
_REST_S, _IDLE_S = 2.0, 0.1  # for the rest of an output: in all, and without any
_WATCH_S = 0.5  # between two looks at the disk, while a step runs
_ROOT = "0"  # the user that may end anybody's processes
_NOT_RUN = 126  # the engine's exit code for what it could not start
_SLACK = 64 << 10  # of a disk limit that the storage driver enforces


class Unkillable(Exception):
    """Processes of a step survived every try to end them."""


class NotBegun(Exception):
    """The shell of a step did not start; `evidence` tells which limit struck meanwhile."""

    def __init__(self, problem: str, evidence: Evidence):
        self.evidence = evidence
        super().__init__(problem)


@dataclass
class Place:
    """A container to run in. quota: its disk limit is enforced by the storage driver."""

    engine: Engine
    container: str
    limits: Limits
    groups: Groups
    user: str = ""
    quota: bool = False
    disk_at_start: int = 0


@dataclass
class _Step:
    """One step in flight."""

    place: Place
    output: Stream
    control: Control
    until: Until
    spool: Spool
    deadline: float
    next_look: float
    over: bool = False  # its output has ended
    timed_out: bool = False
    disk_full: bool = False

    @property
    def ended(self) -> bool:
        return self.over or (self.until.found and self.control.ended)

    def take(self, stream: int, data: bytes) -> None:
        if stream == 2:
            self.control.add(data)
        else:
            self.spool.add(self.until.add(data))


async def run(
    place: Place, call: Callable[[str], list[str]], session: Session, timeout_s: float
) -> tuple[Evidence, Session]:
    """Run what `call` makes of a token; the evidence, and the session for the next step.

    Raises EngineTrouble, Unkillable, NotBegun.
    """
    if place.groups.read().processes < place.limits.pids:
        try:
            return await _once(place, call, session, timeout_s)
        except NotBegun as problem:
            if not problem.evidence.pids_refused:
                raise
    # Full of processes that earlier steps left: there is room for this step, for its time.
    limit = place.limits.pids + PIDS_RESERVE
    await place.engine.pids_limit(place.container, limit + _PIDS_TO_KILL)
    try:
        return await _once(place, call, session, timeout_s)
    finally:
        await place.engine.pids_limit(place.container, limit)


async def _once(
    place: Place, call: Callable[[str], list[str]], session: Session, timeout_s: float
) -> tuple[Evidence, Session]:
    token = secrets.token_hex(16)
    before, began = place.groups.read(), monotonic()
    process, output = await place.engine.exec(place.container, call(token), place.user)
    step = _Step(
        place, output, Control(token.encode()), Until(token.encode()),
        Spool(place.limits.output_bytes), began + timeout_s, began + _WATCH_S,
    )  # fmt: skip
    try:
        await _follow(step)
        wall = monotonic() - began
        limited = step.timed_out or step.disk_full
        if limited:
            await _end(step, before)
        step.spool.add(step.until.rest())
    finally:
        await output.close()
    code, number = (137, 9) if limited else await _exit(step, process)
    evidence = await _told(step, code, number, before, wall)
    if code == _NOT_RUN and not limited and not step.control.begun:
        # Instead of the shell's output, what the engine says of it.
        raise NotBegun(evidence.tail.decode("utf-8", "replace").strip()[-300:], evidence)
    kept = None if limited else step.control.session(session)
    return evidence, kept or session


async def _follow(step: _Step) -> None:
    """Until the shell has ended or a limit struck."""
    while not step.ended:
        now = monotonic()
        if now >= step.deadline:
            step.timed_out = True
            return
        if now >= step.next_look and not step.place.quota:
            if await _is_over(step.place):
                step.disk_full = True
                return
            step.next_look = monotonic() + _WATCH_S
        await _read(step, min(step.deadline, step.next_look) - now)
    # Quicker than the looks, and over its limit all the same.
    step.disk_full = not step.place.quota and await _is_over(step.place)


async def _read(step: _Step, wait_s: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, wait_s)):
            message = await step.output.read_out()
    except TimeoutError:
        return
    except (aiohttp.ClientError, DockerError, OSError) as error:
        raise EngineTrouble(f"the output of a step was lost: {error}") from error
    if message is None:
        step.over = True
    else:
        step.take(message.stream, message.data)


async def _end(step: _Step, before: Counts) -> None:
    """Every process of the step; then what they had printed before."""
    known = step.control.known
    await _kill(step.place, shell.kill(known))
    if not await _are_left(step.place, max(len(known), shell.OWN)):
        await _rest(step)
        return
    await _kill(step.place, shell.kill_all())
    if await _are_left(step.place, shell.OWN):
        raise Unkillable("processes of the step survived its time limit")
    await _rest(step)


async def _rest(step: _Step) -> None:
    """What lies in the pipes; the engine may tell their end much later."""
    deadline = monotonic() + _REST_S
    while not step.ended and monotonic() < deadline:
        before = step.spool.total
        await _read(step, _IDLE_S)
        if step.spool.total == before:
            return


async def _kill(place: Place, call: list[str]) -> None:
    """Run a killer to its end; a container full of processes gets room for it."""
    limit = place.limits.pids + PIDS_RESERVE
    await place.engine.pids_limit(place.container, limit + _PIDS_TO_KILL)
    try:
        async with asyncio.timeout(_KILL_S):
            _, output = await place.engine.exec(place.container, call, _ROOT)
            try:
                while (message := await output.read_out()) and message.data != shell.DONE:
                    pass
            finally:
                await output.close()
    except (TimeoutError, EngineTrouble):
        return  # spoiled, or no room: whoever counts finds what is left
    finally:
        await place.engine.pids_limit(place.container, limit)


async def _are_left(place: Place, known: int) -> bool:
    """Whether more processes live than before the step; those that die get a moment."""
    deadline = monotonic() + 1.0
    while await _count(place) > known:
        if monotonic() > deadline:
            return True
        await asyncio.sleep(0.02)
    return False


async def _count(place: Place) -> int:
    shown = place.groups.read().processes
    return shown if shown >= 0 else await place.engine.processes(place.container)


async def disk(place: Place) -> int:
    """Bytes of the container's own files."""
    found = await place.engine.inspect(place.container, size=True)
    return int(found.get("SizeRw") or 0) - place.disk_at_start


async def _is_over(place: Place) -> bool:
    return await disk(place) > place.limits.disk_bytes


async def _exit(step: _Step, process: str) -> tuple[int, int]:
    """Exit code and signal of the shell."""
    told = step.control.exit()
    if told is None:
        # The script around it died too: the engine knows how.
        code, saved = await _exit_code(step.place.engine, process), False
    else:
        code, saved = told
    # Its trap runs unless a signal that cannot be caught ended it; bash gives the same code.
    return code & 0xFF, code - 128 if 128 < code < 160 and not saved else 0


async def _exit_code(engine: Engine, process: str) -> int:
    """Of a process whose output has ended; the engine may take its time to notice its end."""
    deadline = monotonic() + _KILL_S
    while (state := await engine.exec_state(process))["Running"]:
        if monotonic() > deadline:
            raise EngineTrouble("the engine does not tell how a step ended")
        await asyncio.sleep(0.02)
    return int(state["ExitCode"] or 0)


async def _told(step: _Step, code: int, number: int, before: Counts, wall: float) -> Evidence:
    place = step.place
    counted = place.groups.read().since(before)
    full = place.quota and await disk(place) >= place.limits.disk_bytes - _SLACK
    # Else processes that earlier steps left running could starve this one, and it would seem
    # to have been the host.
    alone = 0 <= before.processes <= shell.OWN
    stalls = counted if alone else Counts()
    return Evidence(
        exit_code=code,
        signal=number,
        timed_out=step.timed_out,
        oom_kills=counted.oom_kills,
        pids_refused=counted.pids_refused,
        disk_full=step.disk_full or full,
        wall_s=wall,
        cpu_s=counted.cpu_s,
        head=step.spool.head,
        tail=step.spool.tail,
        total=step.spool.total,
        cpu_stall_s=stalls.cpu_stall_s,
        memory_stall_s=stalls.memory_stall_s,
        io_stall_s=stalls.io_stall_s,
    )
