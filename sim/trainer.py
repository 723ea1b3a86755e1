"""The real TrainerMachine with a modelled disk, and a trainer's calls to bank, store and replicas.

Owns: the shell as services/trainer/driver.py has it, and the checkpoints. Promise: a checkpoint
stands once SaveCheckpoint ended, whatever dies then; what is in memory goes with the process, the
snapshots of versions too. Does not cover: weights (a step is its number).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.bank_calls import batch_from_pb
from muster.errors import Fenced, MusterError, Unavailable
from muster.leased import FrozenBatch, GroupBack, TrainBatch
from muster.streams import StreamEntry
from muster.transfer.newest import Newest
from muster.types import Value
from services.readybank import events as e
from services.trainer import schedule as s
from services.trainer.adapters.version_log import RedisVersionLog, record_to_pb
from services.trainer.figures import Mismatch, StepFigures, StepReport
from services.trainer.lineage import NO_PARENT, Lineage
from services.trainer.ports import ReplicaReport, Stage, VersionRecord
from services.trainer.returns import GroupsReturned, to_keep, to_return
from sim.bank import Bank, as_brought
from sim.engine import Replica
from sim.led import Led, Shared
from sim.models import Model
from sim.streams import ModelStreams, at_once

Then = Callable[[s.TrainerEvent | None], None]
RETRY_S = 120.0
_LEASE_S = 100.0
_CALL_S = 10.0


class Checkpoint(Value, frozen=True):
    """One, on disk. `trained`: every batch in its history, oldest first."""

    step: int
    record: VersionRecord
    lineage: Lineage
    batches: tuple[FrozenBatch, ...]  # since the checkpoint before, as services/trainer/returns.py
    trained: tuple[FrozenBatch, ...]


class Trainer(Led):
    """One trainer; `disk` survives it. `leases` and `waits` are for checks and figures."""

    def __init__(self, shared: Shared, name: str, model: Model):
        super().__init__(shared, name, "trainer")
        self.model = model
        self.disk: list[Checkpoint] = []
        self._noted = 0  # the newest epoch, beside the checkpoints
        self.saved_ever: list[Checkpoint] = []
        self.told_oldest = 0  # it never goes back further
        self.knows = 0  # the incarnation of the store that has all its records
        self.machine: s.TrainerMachine | None = None
        self.on_lease: Callable[[e.SendBatch, TrainBatch], None] = lambda sent, batch: None
        self.on_save: Callable[[Checkpoint], None] = lambda checkpoint: None
        self.on_train: Callable[[int], None] = lambda step: None
        self.on_publish: Callable[[int], None] = lambda version: None  # begins to be sent
        self.unpublished: list[int] = []  # made in this life, and their publication has not ended
        self.batches_at: list[tuple[float, int, tuple[str, ...]]] = []  # when, step, tasks
        self.halts: list[str] = []
        self._came: dict[int, tuple[float, float]] = {}  # batch by step: asked for, here

    def boot(self) -> None:
        self.epoch = 0
        used = self._noted
        self.patiently("epoch", lambda: self.store.next_epoch("trainer", used), self._epoch)

    def died(self) -> None:
        self.machine = None

    def has(self, version: int) -> bool:
        """There is a checkpoint of that version."""
        return any(saved.record.version == version for saved in self.disk)

    def roll_back(self) -> bool:
        """It dies, and its newest checkpoint is lost; only what the next older one covers, and
        the store: what a power cut took as well is nowhere, and the bank says so for good."""
        if len(self.disk) < 2 or self.disk[-2].step < self.told_oldest:
            return False
        if any(self.store.may_have_lost(*self._came[b.step]) for b in self.disk[-1].batches):
            return False
        self.kill(0.5)
        self.disk.pop()
        return True

    def _epoch(self, epoch: int) -> None:
        self.epoch = self._noted = epoch
        self.lead()

    def lead(self) -> None:
        self.shared.announce(self)
        self.streams = ModelStreams(self.store, role="trainer", epoch=self.epoch)
        self.machine = s.TrainerMachine(
            checkpoint_every=self.model.checkpoint_every,
            checkpoint_idle_s=10.0,
            ahead_max=self.model.ahead_max,
        )
        self._snapshots: Newest[int] = Newest()
        self.unpublished = []
        self._batch: TrainBatch | None = None
        self._unsaved: tuple[FrozenBatch, ...] = ()
        self._revisions: dict[int, int] = {}
        self.every(5.0, self._look)
        self.patiently("versions", self._known, self._start)

    def _look(self) -> None:
        """For a store that was restarted, then for replicas."""

        def heard(life: Any) -> None:
            if life != self.knows and not isinstance(life, MusterError):
                self.knows = life
                self.feed(s.ServerRestarted())
            self.feed(s.ReplicasDue())

        self.at_store("server", lambda: self.shared.server.life, heard)

    def _known(self) -> dict[int, Any]:
        self.knows = self.shared.server.life
        log = RedisVersionLog.__new__(RedisVersionLog)
        log._streams = self.streams  # type: ignore[assignment]
        return dict(at_once(log.known()))

    def _start(self, known: dict[int, Any]) -> None:
        parents = {version: found.parent for version, found in known.items()}
        if self.disk:
            newest = self.disk[-1]
            self.lineage = newest.lineage.join(parents)
            self._trained, self._saved = newest.trained, newest.batches
            step, record = newest.step, newest.record
        else:
            self.lineage = Lineage({0: NO_PARENT}, 0).join(parents)
            self._trained, self._saved = (), ()
            step, record = 0, VersionRecord(0, NO_PARENT, "d0", "base")
        self._snapshot(record.version)
        self.feed(s.Started(step, record, self.lineage.next_version, self._oldest_kept()))

    def _snapshot(self, version: int) -> None:
        self._snapshots.keep(version, version)
        if version not in self.unpublished:
            self.unpublished.append(version)

    def _oldest_kept(self) -> int:
        kept = self.disk[-self.model.checkpoints_kept :]
        return kept[0].step if len(kept) == self.model.checkpoints_kept else 0

    def feed(self, event: s.TrainerEvent) -> None:
        if self.machine is None:
            return
        commands = self.machine.handle(event, self.world.now)
        self.world.record(self.name, event, commands)
        self._next(list(commands))

    def _next(self, commands: list[s.Command]) -> None:
        """The commands of one answer, one after the other; a publication goes on beside them."""
        if not commands:
            return
        first, rest = commands[0], commands[1:]
        if isinstance(first, s.Publish):
            self._publish(first)
            self._next(rest)
        else:
            self._do(first, lambda event: self._done(event, rest))

    def _done(self, event: s.TrainerEvent | None, rest: list[s.Command]) -> None:
        if event is not None:
            self.feed(event)
        self._next(rest)

    def _do(self, command: s.Command, then: Then) -> None:
        match command:
            case s.Register():
                self._register(command, then)
            case s.LeaseBatch():
                self._lease(command.step, then)
            case s.AcknowledgeBatch():
                self._acknowledge(command, then)
            case s.RecordVersion():
                self._record(command.record, then)
            case s.Halt():
                self.halts.append(command.problem)
                self.exit(f"halts: {command.problem}")
            case _:
                self._do_here(command, then)

    def _do_here(self, command: s.Command, then: Then) -> None:
        """What needs nobody else."""
        match command:
            case s.TrainStep():
                self.on_train(command.step)
                wait = self.world.spread("train", self.model.train_s)
                self.soon(wait, lambda: self._trained_step(command.step, then))
            case s.SealVersion():
                self._seal(command, then)
            case s.SaveCheckpoint():
                self.soon(self.model.save_s, lambda: self._save(command, then))
            case s.PruneCheckpoints():
                self.disk = [c for c in self.disk if c.step >= command.oldest_kept]
                then(None)
            case _:
                raise TypeError(f"no such command: {command!r}")

    # the bank

    def _ask(
        self, op: str, make: Callable[[str], e.BankEvent], hear: Callable[[Any], None], s_: float
    ) -> None:
        """One call, repeated while the bank is away; a refusal ends the trainer."""
        since = self.world.now

        def attempt() -> None:
            names = self.shared.listed("readybank", self)
            if not names:
                again(Unavailable("no ready bank has announced itself"))
                return
            bank = self.shared.processes[names[-1]]
            assert isinstance(bank, Bank)
            self.net.call(self, bank, op, lambda r: bank.ask(op, make, r, s_), again, s_)

        def again(found: Any) -> None:
            if not isinstance(found, MusterError):
                hear(found)
            elif isinstance(found, Unavailable) and (
                op == "LeaseBatch" or self.world.now - since < RETRY_S
            ):
                self.soon(0.5, attempt)
            else:
                kind = "fenced" if isinstance(found, Fenced) else "refused"
                self.halts.append(f"{op}: {kind}: {found.problem}")
                self.exit(f"{op}: {kind}: {found.problem}")

        attempt()

    def _register(self, command: s.Register, then: Then) -> None:
        """With every batch that the newest checkpoint added."""
        epoch, step = self.epoch, command.last_durable_step
        batches = tuple(map(as_brought, self._saved))
        self.told_oldest = max(self.told_oldest, command.oldest_kept)
        self._ask(
            "Register",
            lambda call: e.TrainerRegistered(
                epoch, step, call, batches, oldest_kept_step=command.oldest_kept
            ),
            lambda found: then(s.Registered(found.next_step)),
            _CALL_S,
        )

    def _lease(self, step: int, then: Then) -> None:
        epoch, groups, at = self.epoch, self.model.groups_per_batch, self.wall()
        asked_at = 0.0

        def asked(call: str) -> e.LeaseAsked:
            nonlocal asked_at
            asked_at = self.world.now
            return e.LeaseAsked(epoch, step, groups, call, at, self._revisions.get(step - 1))

        def heard(found: Any) -> None:
            sent, parts = found
            if isinstance(parts, MusterError):
                self.soon(0.5, lambda: self._lease(step, then))
                return
            self._batch = batch_from_pb(parts)
            self._revisions[step] = self._batch.frozen.revision
            self._came[step] = (asked_at, self.world.now)
            # Else what it was made of may be gone: none will end it.
            if all(at < asked_at for at in self.store.cut_at):
                self.on_lease(sent, self._batch)
            tasks = tuple(t.task for t in self._batch.trajectories)
            self.batches_at.append((self.world.now, self._batch.step, tasks))
            then(s.BatchLeased(self._batch.step))

        self._ask("LeaseBatch", asked, heard, _LEASE_S)

    def _acknowledge(self, command: s.AcknowledgeBatch, then: Then) -> None:
        epoch, revision = self.epoch, self._revisions.get(command.step)
        self.told_oldest = max(self.told_oldest, command.oldest_kept)
        self._ask(
            "AcknowledgeBatch",
            lambda c: e.AckAsked(epoch, command.step, c, command.oldest_kept, revision),
            lambda _: then(s.BatchAcknowledged(command.step)),
            _CALL_S,
        )

    # versions and checkpoints

    def _record(self, record: VersionRecord, then: Then) -> None:
        message = record_to_pb(record)
        dedupe = f"{message.version}/{message.stage}"
        entry = StreamEntry("versions", "versions", dedupe, message.SerializeToString())
        effect = lambda: at_once(self.streams.append([entry]))  # noqa: E731 - one line
        done = s.VersionRecorded(record.version, record.stage)
        self.patiently("RecordVersion", effect, lambda _: then(done))

    def _trained_step(self, step: int, then: Then) -> None:
        assert self._batch is not None
        assert self._batch.step == step
        back = self._back(self._batch)
        if back:
            self._give_back(step, back, then)
            return
        self._unsaved += (self._batch.frozen,)
        n = len(self._batch.trajectories)
        moved = self.world.spread("step_kl", self.model.step_kl)
        figures = StepFigures(step_kl=moved, step_kl_tokens=1) if moved else StepFigures()
        report = StepReport(step, figures, n, n, 0, len(self._batch.frozen.members), 0, 0.0)
        then(s.StepTrained(report))

    def _back(self, batch: TrainBatch) -> tuple[GroupBack, ...]:
        """Now and then some group or other is too far off, by chance."""
        chance = self.world.rng("returns")
        if not self.model.returns or chance.random() >= self.model.returns:
            return ()
        worst = dict.fromkeys(t.id for t in chance.sample(batch.trajectories, k=2))
        return to_return(batch, {id_: Mismatch(tokens=1, k3=1.0) for id_ in worst}, 0.5)

    def _give_back(self, step: int, back: tuple[GroupBack, ...], then: Then) -> None:
        epoch = self.epoch
        groups = tuple(e.GivenBack(g.group, g.reason, g.measured_kl) for g in back)
        self._revisions.pop(step, None)
        self._ask(
            "ReturnGroups",
            lambda call: e.ReturnAsked(epoch, step, groups, call),
            lambda _: then(GroupsReturned(step)),
            _CALL_S,
        )

    def _grown(self, version: int) -> Lineage:
        known = self.lineage
        return known if known.current == version else known.grow(version)

    def _seal(self, command: s.SealVersion, then: Then) -> None:
        self.lineage = self._grown(command.version)
        self._snapshot(command.version)
        version, parent = command.version, command.parent
        record = VersionRecord(version, parent, f"d{version}", "", Stage.TRAINED, command.report)
        then(s.VersionSealed(command.step, record))

    def _save(self, command: s.SaveCheckpoint, then: Then) -> None:
        self.lineage = self._grown(command.version)
        if not command.digest:
            self._snapshot(command.version)
        record = VersionRecord(
            command.version, command.parent, f"d{command.version}", "disk", report=command.report
        )
        self._trained = (*self._trained, *self._unsaved)
        self._saved, self._unsaved = to_keep(self._saved, self._unsaved), ()
        saved = Checkpoint(command.step, record, self.lineage, self._saved, self._trained)
        self.disk.append(saved)
        self.saved_ever.append(saved)
        self.on_save(saved)
        then(s.CheckpointSaved(command.step, record, self._oldest_kept()))

    def _publish(self, command: s.Publish) -> None:
        """From its snapshot, which must still be there."""
        assert self._snapshots.of(command.version) == command.version
        epoch = self.epoch  # of this incarnation, however late a request arrives
        self.on_publish(command.version)
        names = [n for n in self.shared.listed("inference", self) if n not in command.skip]
        left = len(names)
        reports: list[ReplicaReport] = []

        def heard(name: str, found: Any) -> None:
            nonlocal left
            left -= 1
            error = str(found) if isinstance(found, MusterError) else ""
            if found != "served":
                reports.append(ReplicaReport(name, error=error))
            if not left:
                done()

        def done() -> None:
            serving = sum(
                r.version == command.version
                for r in self.shared.of_role("inference")
                if isinstance(r, Replica)
            )
            self.unpublished = [v for v in self.unpublished if v > command.version]
            self.feed(s.Published(tuple(reports), serving))

        if not names:
            self.soon(0.2, done)
        for name in names:
            replica = self.shared.processes[name]
            assert isinstance(replica, Replica)
            self.net.call(
                self,
                replica,
                "Publish",
                lambda respond, r=replica: r.publish(epoch, command.version, respond),  # type: ignore[misc]
                lambda found, n=name: heard(n, found),  # type: ignore[misc]
                _CALL_S,
            )
