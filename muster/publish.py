"""Weights of any trainer to the engines of its run.

    with BankClient() as bank, Publisher(model, bank) as publisher:
        for batch in bank.batches():
            ...  # an optimizer step
            publisher.publish()
            bank.acknowledge(batch)

Promise: `publish` returns when every replica that could take the new version serves it; the version
stands in the run's record before any token of it does; a replica that comes later, or missed it, is
sent the same bytes while training goes on; a trainer that was replaced is told so (Fenced) and
changes nothing. `AsyncPublisher` is the same for programs with an event loop.
Does not cover: who waits for whom over several processes (call it in one of them), checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, Unpack

from muster import telemetry
from muster.background import in_daemon
from muster.bank import AsyncBankClient, BankClient
from muster.clock import monotonic
from muster.engine_tensors import Slot, Source, engine_tensors, first_difference, model_slots
from muster.errors import Fenced, MusterError, Refused
from muster.find_run import Where, find_run
from muster.loop_thread import LoopThread
from muster.patience import patiently
from muster.seat import NO_PARENT, Seat, take_seat
from muster.tasks import end
from muster.transfer.publisher import TransferSettings
from muster.transfer.snapshot import Snapshot
from muster.transfer.wire import report_to_pb
from muster.v1 import events_pb2 as ev
from muster.version_line import VersionLine
from muster.version_records import VersionRecords
from muster.version_sender import Published as Published
from muster.version_sender import VersionSender

T = TypeVar("T")
_ASK_S = 0.5
_log = telemetry.logger("muster.publish")


class PublisherSettings(Where, total=False):
    """The arguments of AsyncPublisher."""

    model_folder: Path | str | None
    dtype: str
    transfer: TransferSettings | None
    replica_check_s: float
    replicas_wait_s: float
    patience_s: float


class AsyncPublisher:
    """See the module. Open it with `async with`.

    source: the model (its tied, wrapped and sharded weights are understood), a mapping of names to
    tensors, a function that gives one, or a model folder; it holds the version that the run stands
    at. bank: whose seat it shares; without one it takes the run's seat itself, and `where` (as of
    AsyncBankClient) says where the run is. model_folder: what the run began with, for names, shapes
    and dtypes; None: as the run is configured, where this machine has it, else nothing is checked
    here. dtype: in which weights are sent; "": as they are in that folder. transfer: how they
    travel. replica_check_s: how often replicas that lack the version are looked for.
    replicas_wait_s: how long `publish` waits for a first one. patience_s: how long Redis may be
    away.
    """

    def __init__(
        self,
        source: Source,
        bank: AsyncBankClient | None = None,
        *,
        model_folder: Path | str | None = None,
        dtype: str = "",
        transfer: TransferSettings | None = None,
        replica_check_s: float = 5.0,
        replicas_wait_s: float = 60.0,
        patience_s: float = 120.0,
        **where: Unpack[Where],
    ):
        self._source, self._bank, self._where = source, bank, where
        self._folder = None if model_folder is None else Path(model_folder)
        self._dtype = dtype
        self._transfer = transfer or TransferSettings()
        self._check_s, self._wait_s = replica_check_s, replicas_wait_s
        self._patience_s = patience_s
        self._stack = AsyncExitStack()
        self._one_at_a_time = asyncio.Lock()
        self._slots: dict[str, Slot] | None = None
        self._gone: Fenced | None = None
        self._steps = 0
        self._told = -1  # version that was recorded as published
        self._seat: Seat
        self._records: VersionRecords
        self._sender: VersionSender
        self._line: VersionLine
        self._snapshot: Snapshot

    @property
    def version(self) -> int:
        """The version that the trainer's weights were when last published."""
        return self._line.current

    @property
    def digest(self) -> str:
        """Name of those weights: equal weights, equal digest."""
        return self._line.digest

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._bank is not None:
                self._seat = self._bank.seat
            else:
                self._seat = await stack.enter_async_context(take_seat(find_run(**self._where)))
            await self._start()
            watching = await stack.enter_async_context(asyncio.TaskGroup())
            task = watching.create_task(self._watch(), name="publisher-watch")
            stack.push_async_callback(end, task)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def publish(
        self,
        source: Source | None = None,
        *,
        step: int | None = None,
        step_kl: float | None = None,
        if_changed: bool = False,
    ) -> Published:
        """The weights as they are now become the next version, and every replica gets it.

        source: other than the one given at first, for this version. step: the optimizer step (the
        batch's) that made it; None: that of the batch leased last. Give it where the next batch is
        leased before, or checkpoints are acknowledged after the next version. step_kl: mean KL per
        token from the version before, where it was measured. if_changed: weights that are those of
        the newest version make none; replicas that lack it are sent it. Call it between steps:
        nothing may change the weights while they are copied, at the beginning.
        Raises InvalidInput for weights that no engine of the run can load, Unavailable when no
        replica took it (the version stands, and is brought to whoever comes), Fenced.
        """
        self._check_seat()
        async with self._one_at_a_time:
            await self._seal(source, self._step(step), step_kl, if_changed)
            if step is not None:
                self._seat.seal(step)
            return await self._bring_to_some()

    async def sync(self) -> Published:
        """Bring the newest version to every replica that lacks it; makes no new one."""
        self._check_seat()
        async with self._one_at_a_time:
            return await self._bring(())

    async def durable(self, checkpoint: Path | str) -> None:
        """The version is in `checkpoint`, a model folder: an engine that starts loads it there."""
        self._check_seat()
        await self._records.durable(_absolute(checkpoint))

    async def _start(self) -> None:
        """Where the run stands, and that the trainer's weights are that."""
        seat = self._seat
        self._slots = await in_daemon(self._read_slots, "model-slots")
        self._snapshot = await self._copy(None, seat.version, seat.parent)
        digest = self._snapshot.manifest.digest
        if seat.digest not in ("", digest):
            raise Refused(
                f"these are not the weights of version {seat.version}, which this trainer resumes",
                field="model",
                value=digest[:12],
                way_out="load the weights of the checkpoint that you resume from; if you did, they "
                "were not published when it was acknowledged: resume from the one before, and "
                "publish before you acknowledge",
            )
        self._records = VersionRecords(seat)
        self._sender = VersionSender(seat, self._transfer)
        served = await self._sender.newest()
        self._line = VersionLine(await self._records.known(), seat.version, digest, served)
        record = _record(self._snapshot, seat.step)
        if seat.parent == NO_PARENT:
            record.ClearField("step")
            if self._folder is not None:
                if not self._line.recorded:
                    await self._check_first(self._folder)
                record.stage, record.checkpoint = ev.VERSION_STAGE_DURABLE, str(self._folder)
        await self._records.sealed(record)
        seat.digest = digest
        await self._bring(())

    def _read_slots(self) -> dict[str, Slot] | None:
        if self._folder is None:
            folder = Path(self._seat.config.model.path)
            self._folder = folder if folder.is_dir() else None
        return None if self._folder is None else model_slots(self._folder)

    async def _check_first(self, folder: Path) -> None:
        """Version 0 is what the engines began with; nobody has compared it yet."""
        tensors = self._snapshot.tensors()
        other = await in_daemon(lambda: first_difference(tensors, folder), "compare-weights")
        if other:
            raise Refused(
                f"the engines begin with other weights than this model (first {other!r})",
                field="model",
                value=folder,
                way_out="load the model from that folder (bank.model), or start the run with yours",
            )

    async def _seal(
        self, source: Source | None, step: int, step_kl: float | None, if_changed: bool
    ) -> None:
        copied = await self._copy(source, self._seat.version, self._seat.parent)
        if if_changed and copied.manifest.digest == self._line.digest:
            return
        version, parent = self._line.seal()
        made = copied.renamed(version, parent)
        record = _record(made, step, step_kl)
        await self._patiently("the versions stream", lambda: self._records.sealed(record))
        self._snapshot = made
        self._line.sealed(version, record.digest)
        seat = self._seat
        seat.version, seat.parent, seat.digest = version, parent, record.digest
        self._sender.tries.forget()

    async def _copy(self, source: Source | None, version: int, parent: int) -> Snapshot:
        given = self._source if source is None else source

        def take() -> Snapshot:
            tensors = engine_tensors(given, self._slots, self._dtype)
            return Snapshot.take(tensors, version=version, parent=parent)

        return await in_daemon(take, "snapshot")

    def _step(self, step: int | None) -> int:
        if step is None:
            step = self._bank.leased if self._bank is not None else self._steps + 1
        self._steps = max(self._steps, step)
        return step

    async def _bring_to_some(self) -> Published:
        """To every replica that is there; waits for a first one."""
        began = monotonic()
        while True:
            done = await self._patiently("Redis", lambda: self._bring(()))
            if done.serving:
                return done
            if done.reports:
                raise self._sender.nobody_took(done)
            if monotonic() - began > self._wait_s:
                raise self._sender.nobody_there(done.version, self._wait_s)
            await asyncio.sleep(_ASK_S)

    async def _bring(self, skip: Collection[str]) -> Published:
        done = await self._sender.bring(self._snapshot, skip)
        # Also what a former incarnation sent, which may have ended before its record.
        first = self._snapshot.manifest.parent == NO_PARENT and not done.reports
        if done.serving and not first and self._told != done.version:
            await self._records.published(map(report_to_pb, done.reports))
            self._told = done.version
        return done

    async def _patiently(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        way_out = "start it again; the version is sent when it is there"
        return await patiently(what, call, patience_s=self._patience_s, way_out=way_out)

    async def _watch(self) -> None:
        """Replicas that come late, or missed the version; a server that forgot records."""
        while self._gone is None:
            await asyncio.sleep(self._check_s)
            try:
                async with self._one_at_a_time:
                    await self._records.look_at_server()
                    await self._bring(self._sender.tries.look())
            except Fenced as error:
                _log.error("%s", error)
                self._gone = error
            except MusterError as error:
                _log.warning("looking for replicas: %s", error)

    def _check_seat(self) -> None:
        if self._gone is not None:
            raise self._gone


class Publisher:
    """The same for plain training loops: every call blocks. Arguments: see AsyncPublisher."""

    def __init__(
        self, source: Source, bank: BankClient | None = None, **settings: Unpack[PublisherSettings]
    ):
        self._bank = bank
        self.asynchronous = AsyncPublisher(source, bank.asynchronous if bank else None, **settings)
        self._loop: LoopThread

    def __enter__(self) -> Self:
        self._loop = self._bank.loop if self._bank else LoopThread()
        try:
            self._loop.enter(self.asynchronous)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._loop.leave(self.asynchronous)
        if self._bank is None:
            self._loop.close()

    @property
    def version(self) -> int:
        """The version that the trainer's weights were when last published."""
        return self.asynchronous.version

    @property
    def digest(self) -> str:
        """Name of those weights: equal weights, equal digest."""
        return self.asynchronous.digest

    def publish(
        self,
        source: Source | None = None,
        *,
        step: int | None = None,
        step_kl: float | None = None,
        if_changed: bool = False,
    ) -> Published:
        """See AsyncPublisher.publish."""
        work = self.asynchronous.publish(source, step=step, step_kl=step_kl, if_changed=if_changed)
        return self._loop.call(work)

    def sync(self) -> Published:
        """See AsyncPublisher.sync."""
        return self._loop.call(self.asynchronous.sync())

    def durable(self, checkpoint: Path | str) -> None:
        """See AsyncPublisher.durable."""
        self._loop.call(self.asynchronous.durable(checkpoint))


def _record(made: Snapshot, step: int, step_kl: float | None = None) -> ev.PolicyVersionRecord:
    manifest = made.manifest
    return ev.PolicyVersionRecord(
        version=manifest.version,
        parent=manifest.parent,
        digest=manifest.digest,
        stage=ev.VERSION_STAGE_TRAINED,
        step_kl=step_kl,
        step=ev.StepReport(step=step),
    )


def _absolute(folder: Path | str) -> str:
    """The record is read by others."""
    return str(Path(folder).absolute())
