"""Batches of a run for any trainer.

    with BankClient() as bank:
        for batch in bank.batches(steps=3):
            ...  # train on batch.samples, or on batch.tensors()
            bank.acknowledge(batch)

Promise: the trainer's seat is taken when the block begins, so a former trainer gets nothing any
more; a batch that was not acknowledged comes again, unchanged, to whoever takes the seat next; with
a checkpoint's folder, what that checkpoint has not seen comes again and nothing else; a bank that
is restarted or moves is waited for. `AsyncBankClient` is the same for programs with an event loop.
Raises the exceptions of muster.errors: Fenced when another trainer has taken the seat.
Does not cover: sending weights back (publish.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, Unpack

from msgspec.structs import replace

from muster.advantage import Estimator
from muster.bank_calls import GrpcBank, groups_announced
from muster.config import Config
from muster.errors import InvalidInput, Refused
from muster.find_run import Where, find_run
from muster.leased import FrozenBatch
from muster.loop_thread import LoopThread
from muster.patience import patiently
from muster.registry import Registry
from muster.samples import Batch, batch_of
from muster.seat import ResumePoint, Seat, read_resume, take_seat, write_resume
from muster.streams import connect

T = TypeVar("T")
_CALL_S = 20.0


class BankSettings(Where, total=False):
    """The arguments of AsyncBankClient."""

    resume: Path | str | ResumePoint | None
    groups: int
    estimator: Estimator
    lease_wait_s: float
    patience_s: float


class AsyncBankClient:
    """See the module. Open it with `async with`.

    config, state_dir, redis_url, run: where the run is (find_run.py); without any, the `muster up`
    that runs with the state folder of MUSTER_STATE_DIR or .muster. resume: a checkpoint folder that
    was acknowledged, or what `state` gave; None begins with step 1. groups: in a batch; 0: as many
    as the run's bank says that its batches have, which is also the most. estimator: how rewards
    become advantages (advantage.py). lease_wait_s: of one call; the wait for a batch has no end.
    patience_s: how long the bank may be away.
    """

    def __init__(
        self,
        *,
        resume: Path | str | ResumePoint | None = None,
        groups: int = 0,
        estimator: Estimator = "grpo",
        lease_wait_s: float = 300.0,
        patience_s: float = 120.0,
        **where: Unpack[Where],
    ):
        self._where, self._resume = where, resume
        self._groups, self._estimator = groups, estimator
        self._lease_wait_s, self._patience_s = lease_wait_s, patience_s
        self._stack = AsyncExitStack()
        self.seat: Seat
        self.config: Config
        self.leased = 0  # step of the batch that was leased last
        self.next_step = 1
        self._durable = ResumePoint("")
        self._unsaved: dict[int, FrozenBatch] = {}  # leased since; by step

    async def __aenter__(self) -> Self:
        self.config = find_run(**self._where)
        resume = self._resume
        if isinstance(resume, str | Path):
            resume = read_resume(Path(resume)) or _no_resume(resume)
        async with AsyncExitStack() as stack:
            async with connect(self.config.redis) as redis:  # asked before anyone is fenced
                known = Registry(redis, self.config.run)
                told = await self._patiently(lambda: groups_announced(known))
            groups = _groups(self._groups, told)
            self.seat = await stack.enter_async_context(take_seat(self.config, resume))
            at = resume or ResumePoint(self.seat.run)
            self._durable = replace(at, epoch=self.seat.epoch)
            self._calls = GrpcBank(
                self.seat.registry,
                run=self.seat.run,
                epoch=self.seat.epoch,
                groups=groups,
                lease_wait_s=self._lease_wait_s,
                call_deadline_s=_CALL_S,
            )
            answer = await self._patiently(lambda: self._calls.register(at.step, at.batches, 0))
            self._check_next(answer.next_step, at.step)
            self.leased, self.next_step = at.step, answer.next_step
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @property
    def model(self) -> Path:
        """Folder of the model that the run began with, where this machine has it."""
        return Path(self.config.model.path)

    async def lease(self) -> Batch:
        """The next batch, as soon as it is there."""
        step = self.next_step
        while True:
            try:
                leased = await self._patiently(lambda: self._calls.lease(step), long=True)
                break
            except TimeoutError:
                continue  # that call's time was over; the bank goes on collecting
        self.leased, self.next_step = step, step + 1
        self._unsaved[step] = leased.frozen
        return batch_of(leased, self._estimator)

    async def batches(self, steps: int | None = None) -> AsyncIterator[Batch]:
        """Batch after batch; `steps` of them, or without end."""
        count = 0
        while steps is None or count < steps:
            yield await self.lease()
            count += 1

    def state(self, batch: Batch | int) -> ResumePoint:
        """What a checkpoint that has `batch` and all before it must keep, and bring as `resume`."""
        step = batch if isinstance(batch, int) else batch.step
        new = tuple(self._unsaved[s] for s in sorted(self._unsaved) if s <= step)
        seat = self.seat
        return ResumePoint(seat.run, step, seat.epoch, *seat.weights(step), new)

    async def acknowledge(
        self, batch: Batch | int, checkpoint: Path | str | None = None, *, oldest_kept: int = 0
    ) -> int:
        """`batch` (or step) and all before it are in a checkpoint; answers the groups in it.

        checkpoint: its folder, which then gets the file that `resume` reads, before the bank hears
        of it. Its weights are to be published by then: the version that was published for the step,
        else the one published last, is what the file says they are. Without one, bring `state` back
        yourself, or never. oldest_kept: step of the oldest checkpoint that is kept: what came
        before it is deleted in the bank, and no trainer can go back further; 0 deletes nothing.
        """
        step = batch if isinstance(batch, int) else batch.step
        if step not in self._unsaved and step != self._durable.step:
            raise Refused(
                "no batch of this step was leased here",
                field="step",
                value=step,
                way_out=f"acknowledge one after {self._durable.step}, up to {self.leased}",
            )
        at = self.state(step) if step in self._unsaved else self._durable
        if checkpoint is not None:
            write_resume(Path(checkpoint), at)
        groups = await self._patiently(lambda: self._calls.acknowledge(step, oldest_kept))
        self._durable = at
        self._unsaved = {s: known for s, known in self._unsaved.items() if s > step}
        return groups

    async def _patiently(self, call: Callable[[], Awaitable[T]], *, long: bool = False) -> T:
        return await patiently(
            "the ready bank",
            call,
            patience_s=self._patience_s,
            anew_s=3 * _CALL_S if long else inf,  # a lease lasts while the bank is there
            way_out="start it; acknowledged batches stay so, others come again",
        )

    @staticmethod
    def _check_next(next_step: int, step: int) -> None:
        if next_step > step + 1:
            raise Refused(
                f"the run goes on at step {next_step}: this trainer would never see those between",
                field="resume",
                value=step,
                way_out="resume from the newest checkpoint, or begin another run",
            )


class BankClient:
    """The same for plain training loops: every call blocks. Arguments: see AsyncBankClient."""

    def __init__(self, **settings: Unpack[BankSettings]):
        self.asynchronous = AsyncBankClient(**settings)
        self.loop: LoopThread

    def __enter__(self) -> Self:
        self.loop = LoopThread()
        try:
            self.loop.enter(self.asynchronous)
        except BaseException:
            self.loop.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.loop.close()

    @property
    def model(self) -> Path:
        """Folder of the model that the run began with, where this machine has it."""
        return self.asynchronous.model

    @property
    def next_step(self) -> int:
        """The step that the next lease is for."""
        return self.asynchronous.next_step

    def lease(self) -> Batch:
        """The next batch, as soon as it is there."""
        return self.loop.call(self.asynchronous.lease())

    def batches(self, steps: int | None = None) -> Iterator[Batch]:
        """Batch after batch; `steps` of them, or without end."""
        count = 0
        while steps is None or count < steps:
            yield self.lease()
            count += 1

    def state(self, batch: Batch | int) -> ResumePoint:
        """See AsyncBankClient.state."""
        return self.asynchronous.state(batch)

    def acknowledge(
        self, batch: Batch | int, checkpoint: Path | str | None = None, *, oldest_kept: int = 0
    ) -> int:
        """See AsyncBankClient.acknowledge."""
        work = self.asynchronous.acknowledge(batch, checkpoint, oldest_kept=oldest_kept)
        return self.loop.call(work)


def _groups(asked: int, most: int) -> int:
    """most: as the run's bank tells it, 0 when it does not: settings of this machine may be those
    of no run at all."""
    if not most and asked < 1:
        raise InvalidInput(
            "the bank of this run does not say how many groups a batch has",
            field="groups",
            value=asked,
            way_out="give groups=, as groups_per_batch of the run is",
        )
    if asked < 0 or (most and asked > most):
        raise InvalidInput(
            "the run opens no more groups than that before it has an answer for them",
            field="groups",
            value=asked,
            way_out=f"ask for {most} or fewer, or raise groups_per_batch of the run",
        )
    return asked or most


def _no_resume(folder: Path | str) -> ResumePoint:
    raise InvalidInput(
        "no trainer has acknowledged a batch with this folder",
        field="resume",
        value=folder,
        way_out="name a checkpoint folder that was given to acknowledge(), or none",
    )
