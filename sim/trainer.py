"""A trainer that leases, trains, checkpoints, acknowledges, and may be killed anywhere between.

It is a stand-in, not the trainer's machine: what it does is what any trainer may do to the bank.
"""

from __future__ import annotations

from collections.abc import Callable

from services.readybank import events as e
from sim.bank import Bank
from sim.models import Model, spread
from sim.store import RunStore
from sim.world import World

RETRY_S = 3.0


class Trainer:
    """`history`: (batch, version made of it) up to its newest checkpoint; `leases`: all it got."""

    def __init__(self, world: World, store: RunStore, bank: Bank, model: Model):
        self.world, self.store, self.bank, self.model = world, store, bank, model
        self.epoch = 0
        self.history: list[tuple[e.Batch, int]] = []
        self.leases: list[e.SendBatch] = []
        self.waits: list[float] = []  # from asking to having, first leases only
        self._newest = 0  # numbers are never reused
        self._asked = 0.0
        self._calls = 0  # only the answer to the newest call is heard
        self.start()

    def start(self) -> None:
        """A new incarnation, at its newest checkpoint; now and then that is an older one."""
        self.epoch += 1
        if self.epoch > 1 and self.history and self.world.chance(0.2):
            self.history.pop()
        self._register()

    @property
    def durable(self) -> int:
        return len(self.history)

    def _call(
        self, kind: str, event: Callable[[str], e.BankEvent], then: Callable[..., None]
    ) -> None:
        """Ask the bank; ask again when no answer comes, for the line may have been cut."""
        epoch = self.epoch
        self._calls += 1
        mine = self._calls

        def answer(command: e.BankCommand) -> None:
            if (epoch, mine) == (self.epoch, self._calls):
                self._calls += 1
                then(command)

        def again() -> None:
            if (epoch, mine) == (self.epoch, self._calls):
                self._call(kind, event, then)

        self.bank.call(kind, event, answer)
        self.world.after(RETRY_S, again)

    def _register(self) -> None:
        epoch, durable = self.epoch, self.durable
        last = self.history[-1][0] if self.history else None
        self._call(
            "register", lambda c: e.TrainerRegistered(epoch, durable, c, last), self._registered
        )

    def _registered(self, command: e.BankCommand) -> None:
        if isinstance(command, e.RefuseCall):  # no record is ever lost here
            self.store.conflicts.append(f"the bank refuses its trainer: {command.problem}")
            return
        self._lease()

    def _lease(self) -> None:
        epoch, step, at = self.epoch, self.durable + 1, self.world.now
        groups = self.model.groups_per_batch
        self._asked = at
        self._call("lease", lambda c: e.LeaseAsked(epoch, step, groups, c, at), self._leased)

    def _leased(self, command: e.BankCommand) -> None:
        if isinstance(command, e.RefuseCall):  # as a trainer that is restarted for it
            self._register()
            return
        assert isinstance(command, e.SendBatch), command
        self.leases.append(command)
        self.waits.append(self.world.now - self._asked)
        epoch = self.epoch
        wait = spread(self.world.rng, self.model.train_s)
        self.world.after(wait, lambda: self._trained(epoch, command.batch))

    def _trained(self, epoch: int, batch: e.Batch) -> None:
        """The checkpoint is durable: the version is announced, then the bank is told."""
        if epoch != self.epoch:
            return
        parent = self.history[-1][1] if self.history else 0
        self._newest += 1
        self.history.append((batch, self._newest))
        seen = [e.VersionSeen(self._newest, parent, published) for published in (False, True)]
        self.store.append([("versions", f"{x.version}/{x.published}", x) for x in seen])
        self.bank.poll()
        step = batch.step
        self._call("ack", lambda c: e.AckAsked(epoch, step, c), lambda _: self._lease())
