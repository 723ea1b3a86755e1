"""The real BankMachine in the world: reads the store with delays, writes to it, can be killed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from services.readybank import events as e
from services.readybank.machine import BankMachine
from sim.models import Model, spread
from sim.store import READ_BY_BANK, RunStore
from sim.world import World

Answer = Callable[[e.BankCommand], None]


class Bank:
    """`calls` maps a waiting call to who is answered; a kill forgets them, as a cut line does."""

    def __init__(self, world: World, store: RunStore, model: Model, rules: e.BankRules):
        self.world, self.store, self.model, self.rules = world, store, model, rules
        self.calls: dict[str, Answer] = {}
        self._number = 0
        self.start()
        self._tick()

    def start(self) -> None:
        """A new incarnation: takes the epoch, then reads everything."""
        self.calls.clear()
        self.store.bank_epoch += 1
        self.machine = BankMachine(self.rules)
        for event in self.store.recovery():
            self.feed(event)
        self._read = {stream: len(self.store.streams[stream]) for stream in READ_BY_BANK}
        self._due = dict.fromkeys(READ_BY_BANK, 0.0)

    def feed(self, event: e.BankEvent) -> None:
        commands = self.machine.handle(event, self.world.now)
        self.world.record("bank", event, commands)
        for command in commands:
            self._execute(command)

    def poll(self) -> None:
        """Schedule what was appended since; each stream arrives in its own order and time."""
        epoch = self.store.bank_epoch
        for stream in READ_BY_BANK:
            for event in self.store.streams[stream][self._read[stream] :]:
                wait = spread(self.world.rng, self.model.deliver_s)
                at = max(self._due[stream], self.world.now + wait)
                self._due[stream] = at
                twice = self.world.chance(self.model.repeated)
                for _ in range(1 + twice):
                    self.world.after(at - self.world.now, partial(self._live, epoch, event))
            self._read[stream] = len(self.store.streams[stream])

    def call(self, kind: str, event: Callable[[str], e.BankEvent], answer: Answer) -> None:
        """What the gRPC server does for a client."""
        self._number += 1
        name = f"{kind}-{self._number}"
        self.calls[name] = answer
        self.feed(event(name))

    def _live(self, epoch: int, event: e.BankEvent) -> None:
        if epoch == self.store.bank_epoch:
            self.feed(event)

    def _tick(self) -> None:
        self.feed(e.Tick())
        self.world.after(5.0, self._tick)

    def _execute(self, command: e.BankCommand) -> None:
        if isinstance(command, e.WriteFrozen | e.WriteTrained | e.WriteFate):
            epoch = self.store.bank_epoch
            wait = spread(self.world.rng, self.model.write_s)
            self.world.after(wait, lambda: self._write(command, epoch))
        elif not isinstance(command, e.TellStall) and command.call in self.calls:
            self.calls.pop(command.call)(command)

    def _write(self, command: e.BankCommand, epoch: int) -> None:
        if self.world.chance(self.model.repeated):
            self.store.write(command, epoch)
        result = self.store.write(command, epoch)
        if result is not None:
            self._live(epoch, result)
