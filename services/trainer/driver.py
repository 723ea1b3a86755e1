"""Carries out what the trainer machine decides.

Owns: the event loop of one trainer incarnation. Promise: the commands of one answer are carried out
in order, and none waits for a publication, which is a task of its own over a snapshot that training
cannot change; a bank or Redis that is away is waited for up to `retry_s`; the door to the outside
opens once the weights are restored; a stop waits for no worker thread, and the step in flight
leaves no trace. Does not cover: what comes after what (schedule.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from muster import failpoints, telemetry
from muster.advantage import Estimator
from muster.clock import monotonic, wall
from muster.errors import Refused, Unavailable
from muster.leased import FrozenBatch, GroupBack, TrainBatch
from muster.tasks import end
from muster.types import Value
from services.trainer import schedule as s
from services.trainer.adapters.checkpoint import CheckpointMeta, CheckpointStore
from services.trainer.adapters.retry import retried
from services.trainer.adapters.worker import in_daemon
from services.trainer.alarms import AlarmLimits, alarms
from services.trainer.figures import Mismatch, StepReport
from services.trainer.lineage import NO_PARENT, Lineage
from services.trainer.plan import plan_step, report_step
from services.trainer.policy import Judge, Policy, SentBack, Stopped
from services.trainer.ports import Bank, Fleet, Stage, VersionLog, VersionRecord
from services.trainer.returns import GroupsReturned, to_keep, to_return

T = TypeVar("T")
Call = Callable[[], Awaitable[T]]
Points = tuple[str, str]
EVENTS_MAX = 64  # a few tasks at a time answer, so a handful is ever queued
_RECORD_POINTS = {
    Stage.TRAINED: ("trainer.record_trained.before", "trainer.record_trained.after"),
    Stage.DURABLE: ("trainer.record_durable.before", "trainer.record_durable.after"),
    Stage.PUBLISHED: ("trainer.record_published.before", "trainer.record_published.after"),
}
_log = telemetry.logger("trainer.driver")


class DriverSettings(Value, frozen=True):
    """Names and waits; meanings in config.py."""

    run: str
    epoch: int
    base: Path
    replica_check_s: float = 5.0
    retry_s: float = 120.0
    retry_first_s: float = 0.2
    checkpoint_every: int = 1
    checkpoint_idle_s: float = 30.0
    ahead_max: int = 0
    start_step: int | None = None
    advantage: Estimator = "grpo"
    return_kl: float = 0.0
    alarms: AlarmLimits = AlarmLimits()


class Driver:
    """One trainer incarnation. To be read: `machine`."""

    def __init__(
        self,
        settings: DriverSettings,
        *,
        load: Callable[[Path], Policy],
        store: CheckpointStore,
        bank: Bank,
        versions: VersionLog,
        fleet: Fleet,
        door: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ):
        self.machine = s.TrainerMachine(
            checkpoint_every=settings.checkpoint_every,
            checkpoint_idle_s=settings.checkpoint_idle_s,
            ahead_max=settings.ahead_max,
        )
        self.settings = settings
        self._load, self._store, self._bank = load, store, bank
        self._versions, self._fleet = versions, fleet
        self.door = door  # open while the trainer is restored and running
        self._events: asyncio.Queue[s.TrainerEvent] = asyncio.Queue(EVENTS_MAX)
        self._server = ""  # the process that keeps the streams, once it is known
        self._abort = threading.Event()
        self._lineage = Lineage({0: NO_PARENT}, 0)
        self._saved: tuple[FrozenBatch, ...] = ()  # what the newest checkpoint has and the one
        self._unsaved: tuple[FrozenBatch, ...] = ()  # before had not; trained since
        self._seen_before: frozenset[int] = frozenset()  # steps that an incarnation before leased
        self._policy: Policy
        self._batch: TrainBatch
        self._tasks = asyncio.TaskGroup()
        self._side: set[asyncio.Task[None]] = set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set (returns), or something fails for good (raises MusterError)."""
        halt: s.Halt | None = None
        async with self._tasks:
            self._begin(self._watch_stop(stopping), "watch-stop")
            self._begin(self._watch_replicas(), "watch-replicas")
            self._begin(self._start(), "start")
            try:
                while halt is None:
                    event = await self._events.get()
                    before = self.machine.phase
                    commands = self.machine.handle(event, monotonic())
                    self._tell(event, before)
                    halt = next((c for c in commands if isinstance(c, s.Halt)), None)
                    if commands and halt is None:
                        self._begin(self._carry_out(commands), type(commands[-1]).__name__)
            finally:
                self._abort.set()
                while left := [task for task in self._side if not task.done()]:
                    await end(*left)  # one that is ending may have begun another
        if halt and halt.problem:
            raise Refused(halt.problem, field="trainer", way_out=halt.way_out)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Beside everything else; it ends with the trainer at the latest."""
        task = self._tasks.create_task(work, name=name)
        self._side.add(task)
        task.add_done_callback(self._side.discard)

    async def _watch_stop(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._abort.set()
        await self._events.put(s.StopRequested())

    async def _watch_replicas(self) -> None:
        while True:
            await asyncio.sleep(self.settings.replica_check_s)
            await self._look_at_server()
            await self._events.put(s.ReplicasDue())

    async def _look_at_server(self) -> None:
        """A restarted one may have lost a record, and a version without one is nobody's."""
        if not self._server:
            return
        try:
            server = await self._versions.server()
        except Unavailable:
            return
        if server != self._server:
            self._server = server
            _log.warning("the server of the streams was restarted: recording versions again")
            await self._events.put(s.ServerRestarted())

    async def _start(self) -> None:
        self._server = await self._retried("the versions stream", self._versions.server)
        known = await self._retried("the versions stream", self._versions.known)
        served = await self._retried("the registry", self._fleet.newest)
        step, record, oldest = await in_daemon(self._restore, "restore")
        self._lineage = self._lineage.join({v: k.parent for v, k in known.items()})
        recorded = known.get(record.version)
        if recorded and recorded.digest != record.digest:
            raise Refused(
                "the run knows this version with other weights",
                field=f"version {record.version} digest",
                value=record.digest,
                way_out="use the model and checkpoints that the run began with, or a new run name",
            )
        async with self.door():
            above = max(self._lineage.next_version, served + 1)
            await self._events.put(s.Started(step, record, above, oldest))
            await asyncio.Event().wait()  # until the end, when this task is cancelled

    def _restore(self) -> tuple[int, VersionRecord, int]:
        """Step, version record and oldest step kept; the policy is loaded."""
        if self.settings.start_step is None:
            self._store.forget_return()
        else:
            self._store.go_back(self.settings.start_step, self.settings.epoch)
        found = self._store.newest()
        if found:
            folder, meta = found
            self._policy, self._lineage = self._load(folder), meta.lineage
            self._saved = meta.batches
            self._take_restored(meta, folder)
            return meta.step, meta.record(folder), self._store.oldest_kept()
        base = self.settings.base
        self._policy = self._load(base)
        digest = self._take(0, NO_PARENT)
        return 0, VersionRecord(0, NO_PARENT, digest, str(base)), 0

    def _take(self, version: int, parent: int) -> str:
        """Snapshot of the live weights, before the next step moves them; its digest."""
        return self._fleet.take(self._policy.engine_state(), version, parent)

    def _take_restored(self, meta: CheckpointMeta, folder: Path) -> None:
        digest = self._take(meta.version, meta.parent)
        if digest != meta.digest:
            raise Refused(
                "the restored weights are not those that were saved as this version",
                field=f"version {meta.version} digest",
                value=digest,
                way_out=f"use the trainer.compute that {folder.name} was written with, or go back "
                "with trainer.start_step",
            )

    async def _carry_out(self, commands: list[s.Command]) -> None:
        for command in commands:
            if isinstance(command, s.Publish):
                self._begin(self._publish(command), f"publish-{command.version}")
                continue
            with telemetry.span(f"trainer.{type(command).__name__}"):
                try:
                    event = await self._do(command)
                except Stopped:
                    return
            if event is not None:
                await self._events.put(event)

    async def _do(self, command: s.Command) -> s.TrainerEvent | None:
        match command:
            case s.Register():
                found = await self._effect(
                    "the ready bank",
                    ("trainer.register.before", "trainer.register.after"),
                    lambda: self._bank.register(
                        command.last_durable_step, self._saved, command.oldest_kept
                    ),
                )
                self._seen_before = frozenset(found.steps_unseen)
                return s.Registered(found.next_step)
            case s.LeaseBatch():
                self._batch = await self._lease(command.step)
                return s.BatchLeased(self._batch.step)
            case s.TrainStep():
                return await self._train_or_return(command.step)
            case s.SealVersion():
                return s.VersionSealed(
                    command.step, await in_daemon(lambda: self._seal(command), "seal")
                )
            case s.SaveCheckpoint():
                return await self._checkpoint(command)
            case s.RecordVersion():
                await self._effect(
                    "the versions stream",
                    _RECORD_POINTS[command.record.stage],
                    lambda: self._versions.append(command.record),
                )
                return s.VersionRecorded(command.record.version, command.record.stage)
            case s.AcknowledgeBatch():
                await self._effect(
                    "the ready bank",
                    ("trainer.acknowledge.before", "trainer.acknowledge.after"),
                    lambda: self._bank.acknowledge(command.step, command.oldest_kept),
                )
                return s.BatchAcknowledged(command.step)
            case s.PruneCheckpoints():
                await self._effect(
                    "the checkpoint folder",
                    ("trainer.prune.before", "trainer.prune.after"),
                    lambda: in_daemon(lambda: self._store.prune(command.oldest_kept), "prune"),
                )
                return None
        raise TypeError(f"no such command: {command!r}")

    async def _publish(self, command: s.Publish) -> None:
        with telemetry.span("trainer.Publish", version=command.version):
            done = await self._retried(
                "the registry",
                lambda: self._fleet.publish(command.version, command.parent, command.skip),
            )
        await self._events.put(s.Published(done.reports, done.serving))

    async def _checkpoint(self, command: s.SaveCheckpoint) -> s.CheckpointSaved:
        record = await self._effect(
            "the checkpoint folder",
            ("trainer.save.before", "trainer.save.after"),
            lambda: in_daemon(lambda: self._save(command), "save"),
        )
        self._saved, self._unsaved = to_keep(self._saved, self._unsaved), ()
        return s.CheckpointSaved(command.step, record, self._store.oldest_kept())

    async def _lease(self, step: int) -> TrainBatch:
        what, points = "the ready bank", ("trainer.lease.before", "trainer.lease.after")
        while True:  # a lease that ends in time without a batch is asked for again
            asked = monotonic()
            try:
                return await self._effect(what, points, lambda: self._bank.lease(step), long=True)
            except TimeoutError:
                _log.info("no batch for step %d in %.0f s, asking again", step, monotonic() - asked)

    async def _train_or_return(self, step: int) -> s.StepTrained | GroupsReturned:
        """Groups that are too far off go back before any weight moves; of a step that is trained
        again none: what would come in its place is of what replicas serve, maybe too far ahead."""
        batch, back = self._batch, tuple[GroupBack, ...]()

        def judge(measured: dict[str, Mismatch]) -> bool:
            nonlocal back
            if step not in self._seen_before:
                back = to_return(batch, measured, self.settings.return_kl)
            return not back

        try:
            report = await in_daemon(lambda: self._train(judge), "train")
        except SentBack:
            points = ("trainer.return.before", "trainer.return.after")
            await self._effect(
                "the ready bank", points, lambda: self._bank.return_groups(step, back)
            )
            told = ", ".join(f"{found.group} ({found.measured_kl:.3g})" for found in back)
            _log.warning("step %d: gave back %s", step, told)
            return GroupsReturned(step)
        self._unsaved += (batch.frozen,)
        return s.StepTrained(report)

    def _train(self, judge: Judge) -> StepReport:
        started = monotonic()
        plan = plan_step(self._batch, self._lineage, self.settings.advantage)
        figures = self._policy.train(plan, self._abort.is_set, judge)
        report = report_step(plan, figures, monotonic() - started, self._batch)
        return replace(report, ended_unix_s=wall())

    def _seal(self, command: s.SealVersion) -> VersionRecord:
        grown = self._grown(command.version)
        digest = self._take(command.version, command.parent)
        self._lineage = grown
        return VersionRecord(
            command.version, command.parent, digest, "", Stage.TRAINED, command.report
        )

    def _grown(self, version: int) -> Lineage:
        """The tree with this version; it has it when it was sealed, or a save is tried again."""
        known = self._lineage
        return known if known.current == version else known.grow(version)

    def _save(self, command: s.SaveCheckpoint) -> VersionRecord:
        """Tried again it has the same effect."""
        grown = self._grown(command.version)
        digest = command.digest or self._take(command.version, command.parent)
        meta = CheckpointMeta(
            run=self.settings.run,
            step=command.step,
            version=command.version,
            parent=command.parent,
            digest=digest,
            trainer_epoch=self.settings.epoch,
            lineage=grown,
            report=command.report,
            batches=to_keep(self._saved, self._unsaved),
        )
        stop = self._abort.is_set
        folder = self._store.save(meta, lambda path: self._policy.write(path, stop), stop)
        self._lineage = grown
        return meta.record(folder)

    async def _effect(self, what: str, points: Points, call: Call[T], *, long: bool = False) -> T:
        """What others can see, between its failpoints; repeated when it may have failed."""

        async def once() -> T:
            await failpoints.at(points[0])
            answer = await call()
            await failpoints.at(points[1])
            return answer

        return await self._retried(what, once, long=long)

    async def _retried(self, what: str, call: Call[T], *, long: bool = False) -> T:
        retry_s, first_s = self.settings.retry_s, self.settings.retry_first_s
        return await retried(what, call, retry_s=retry_s, first_s=first_s, long=long)

    def _tell(self, event: s.TrainerEvent, before: s.Phase) -> None:
        machine = self.machine
        if machine.phase is not before:
            _log.info("%s → %s", before, machine.phase, extra={"step": machine.step})
        if isinstance(event, s.StepTrained):
            _log.info("step %d trained", event.report.step, extra=_figures(event.report))
            for told in alarms(event.report.figures, self.settings.alarms):
                _log.warning("step %d: %s", event.report.step, told)
        if isinstance(event, s.Published):
            for name, missed in machine.missed.items():
                # At tries 1, 2, 4, 8 …: told for as long as it lasts, and ever more seldom.
                fresh = any(report is missed.report for report in event.reports)
                if fresh and missed.tries & (missed.tries - 1) == 0:
                    said = name, machine.record.version, missed.tries, missed.report.error
                    _log.warning("replica %s has missed version %d, %d tries: %s", *said)


def _figures(report: StepReport) -> dict[str, float]:
    figures = report.figures
    return {
        "loss": figures.loss,
        "grad_norm": figures.grad_norm,
        "step_kl": figures.step_kl,
        "mismatch_k3": figures.mismatch.k3,
        "ess_fraction": figures.mismatch.ess_fraction,
        "train_s": report.train_s,
    }
