"""What the callers of a host wait for: a box, a step, a verdict; and who may still have it.

Owns: the record of each box in use and of each box asked for. Promise: a caller that leaves ends
nothing that another may wait for; a caller whose owner epoch is replaced while it waits is told so
at once. Does not cover: which box may exist (pool.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from enum import StrEnum
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from muster.clock import monotonic
from muster.errors import Fenced, MusterError, NotFound, Unavailable
from muster.taskset import Task, TaskFile
from muster.types import EpisodeKey, Limits, Value
from services.sandbox.adapters.hostload import HostLoad
from services.sandbox.box import Evidence
from services.sandbox.content import Setup
from services.sandbox.counts import Counts
from services.sandbox.events import identity
from services.sandbox.layers import Layer
from services.sandbox.ledger import Ledger, StepRecord
from services.sandbox.places import BoxState
from services.sandbox.verdict import Verdict

T = TypeVar("T")
P = ParamSpec("P")


class Made(StrEnum):
    """How a box came to be; the names of BoxSource on the wire."""

    COLD = "COLD"
    FORK = "FORK"
    WARM = "WARM"


class Acquired(Value, frozen=True):
    """A box ready for its first step.

    start_s: its start, with the set-up if that was run for this call, without waiting; waited_s:
    for a place, or for the set-up that another call began.
    """

    box: str
    start_s: float
    workdir: str
    made: Made = Made.COLD
    waited_s: float = 0.0


class Verified(Value, frozen=True):
    """A verdict and the verifier's run."""

    verdict: Verdict
    evidence: Evidence


class Living(Value, frozen=True):
    """A box that takes calls, the owner that used it last, and the newest turn that began."""

    box: str
    key: EpisodeKey
    newest_turn: int


class Capacity(Value, frozen=True):
    """How many boxes there may be: in all, starting at once, unused."""

    boxes_max: int
    starting_max: int
    warm_max: int


class HostStatus(Value, frozen=True):
    """What a host has and does now; `states`: boxes by state of the pool."""

    capacity: Capacity
    states: Mapping[BoxState, int]
    waiting: int
    snapshots: int
    snapshot_bytes: int
    counts: Counts
    load: HostLoad


class UsedBox:
    """What the driver keeps of one box."""

    def __init__(
        self, task: Task, files: dict[str, TaskFile], granted: Limits, setup: Setup, ledger: Ledger
    ):
        self.task, self.files, self.limits, self.ledger = task, files, granted, ledger
        self.setup = setup
        self.forked_from = ""  # the box whose files it goes on from
        self.forked_at = -1  # and the newest turn of that one
        self.copying = ""  # what is copied now, beside which nothing else may run
        self.noted_epoch = -1  # the owner under which its backend would give it to a successor
        self.step: asyncio.Task[StepRecord | MusterError] | None = None
        self.verification: asyncio.Task[Verified | MusterError] | None = None
        self.untold: Verified | None = None  # a verdict that no caller has got yet
        self.final: Verified | None = None  # one that cannot be had again
        self.acquired: Acquired | None = None
        self.touched = False  # a step or verification was asked for
        self.since = monotonic()  # when it was asked for
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Tell those who wait for its end."""
        if not self.ended.done():
            self.ended.set_result(None)

    def stop(self) -> None:
        """Tell them that the host ends before it."""
        if not self.ended.done():
            self.ended.set_exception(stops())
            self.ended.exception()  # nobody may be waiting


class Ask:
    """A box that is asked for, by one caller or several, until it has ended."""

    def __init__(self, key: EpisodeKey, box: UsedBox, ticket: int):
        self.key, self.box, self.ticket = key, box, ticket
        self.attempt = identity(key)
        self.set_up_since = -1.0  # when the set-up that was run for it began
        self.layer: Layer | None = None  # of a fork
        self.answer: asyncio.Future[Acquired] = asyncio.get_running_loop().create_future()
        self.name = ""  # of the box, once its start has begun
        self.callers = 0

    @property
    def pin(self) -> str:
        """Under which it keeps the snapshot that its box will start from."""
        return f"ticket-{self.ticket}"

    def settle(self, error: MusterError) -> None:
        """Tell every caller that there will be no box; nothing if there is one."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # a caller that left must not make the loop complain


class _Counts(Protocol):
    fenced_calls: int


H = TypeVar("H", bound=_Counts)


def counted(
    call: Callable[Concatenate[H, P], Awaitable[T]],
) -> Callable[Concatenate[H, P], Coroutine[Any, Any, T]]:
    """Of a host's method: a call that a former owner made is refused, and counted."""

    @wraps(call)
    async def counting(host: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await call(host, *args, **kwargs)
        except Fenced:
            host.fenced_calls += 1
            raise

    return counting


class Waiting:
    """Callers that wait for something that others may wait for too."""

    def __init__(self) -> None:
        self._fences: dict[asyncio.Future[Fenced], EpisodeKey] = {}

    async def for_(self, key: EpisodeKey, shared: asyncio.Future[T]) -> T:
        """The result of `shared`; Fenced once a newer owner has spoken, NotFound when it was
        cancelled, which is what happens to the work of a box that ends."""
        fence: asyncio.Future[Fenced] = asyncio.get_running_loop().create_future()
        self._fences[fence] = key
        both: tuple[asyncio.Future[T] | asyncio.Future[Fenced], ...] = (shared, fence)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._fences[fence]
        if fence.done():
            raise fence.result()
        if shared.cancelled():
            raise lost("the box was ended meanwhile")
        return shared.result()

    def fence(self, refusal: Callable[[str, int], Fenced | None]) -> None:
        """A newer owner has spoken: tell those whom `refusal` refuses."""
        for fence, key in self._fences.items():
            error = refusal(key.run, key.owner_epoch)
            if error is not None and not fence.done():
                fence.set_result(error)


def known(result: T | MusterError) -> T:
    """The result; raises what was returned in its place."""
    if isinstance(result, MusterError):
        raise result
    return result


def lost(problem: str, box: str = "") -> NotFound:
    """A box is gone with all that was in it. The one sign of it is NotFound with the field `box`.

    box: named when it was ended for another reason than the step that ran in it; without a name it
    went with that step, which may have been the cause.
    """
    way_out = "acquire a new box and run the recorded commands again"
    return NotFound(problem, field="box", value=box, way_out=way_out)


def stops() -> Unavailable:
    """Of a host that ends: its boxes end with it."""
    return Unavailable("this sandbox host stops", field="host.state", way_out="use another host")
