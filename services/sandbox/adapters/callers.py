"""What the callers of a host wait for: a box, a step, a verdict; and who may still have it.

Owns: the record of each box in use and of each box asked for. Promise: a caller that leaves ends
nothing that another may wait for; a caller whose owner epoch is replaced while it waits is told so
at once. Does not cover: which box may exist (pool.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from muster.errors import Fenced, MusterError, NotFound, Unavailable
from muster.taskset import Task, TaskFile
from muster.types import EpisodeKey, Limits, Value
from services.sandbox.box import Evidence
from services.sandbox.ledger import Ledger, StepRecord
from services.sandbox.verdict import Verdict

T = TypeVar("T")
P = ParamSpec("P")


class Acquired(Value, frozen=True):
    """A box ready for its first step; start_s is its start and set-up, without waiting."""

    box: str
    start_s: float
    workdir: str


class Verified(Value, frozen=True):
    """A verdict and the verifier's run."""

    verdict: Verdict
    evidence: Evidence


class Living(Value, frozen=True):
    """A box that takes calls, the owner that used it last, and the newest turn that began."""

    box: str
    key: EpisodeKey
    newest_turn: int


class UsedBox:
    """What the driver keeps of one box."""

    def __init__(self, task: Task, files: dict[str, TaskFile], granted: Limits, ledger: Ledger):
        self.task, self.files, self.limits, self.ledger = task, files, granted, ledger
        self.step: asyncio.Task[StepRecord | MusterError] | None = None
        self.verification: asyncio.Task[Verified | MusterError] | None = None
        self.untold: Verified | None = None  # a verdict that no caller has got yet
        self.acquired: Acquired | None = None
        self.touched = False  # a step or verification was asked for
        self.ended = asyncio.Event()


class Ask:
    """A box that is asked for, by one caller or several, until it has ended."""

    def __init__(self, attempt: EpisodeKey, box: UsedBox, ticket: int):
        self.attempt, self.box, self.ticket = attempt, box, ticket
        self.answer: asyncio.Future[Acquired] = asyncio.get_running_loop().create_future()
        self.name = ""  # of the box, once its start has begun
        self.callers = 0

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
