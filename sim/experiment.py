"""One run of the world: a job, faults for a while, then none, until nothing more can be trained.

Owns: wiring, faults, healing, the end. Promise: safety is checked after every event; once the
faults are over the run must come to its end (liveness), or that is a violation too; one that saw
too little work is void, which is no success. Does not cover: many runs (search.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from muster.types import Fate, Value
from services.readybank.machine import BankMachine
from services.router.machine import RouterMachine
from sim.bank import Bank
from sim.calls import Calls
from sim.checks import Checks, Violation
from sim.engine import Engines, Replica
from sim.faults import Fault, draw
from sim.host import Host
from sim.inject import Injector
from sim.leased import LeaseChecks
from sim.led import Shared
from sim.models import Model
from sim.net import Net
from sim.process import Process
from sim.publishing import PublicationChecks
from sim.router import Router, submit
from sim.states import STATES, States
from sim.streams import Store
from sim.trainer import Trainer
from sim.world import World

AFTER_HEAL_S = 500.0
EPISODES_MIN = 30


class Parts(Value, frozen=True):
    """The machines that are bound; tests plant bugs here."""

    router: type[RouterMachine] = RouterMachine
    bank: type[BankMachine] = BankMachine
    calls: type[Calls] = Calls
    replica: type[Replica] = Replica


class Result(Value, frozen=True):
    """Figures of one run; seconds are simulated."""

    seed: int
    trace: str
    events: int
    end_s: float
    episodes: int
    steps: int
    groups_trained: int
    groups_filtered: int
    groups_evaluated: int
    void: bool
    faults: int
    fired: dict[str, int]
    reach: dict[str, int]
    labels: dict[str, int]
    refused_writes: int
    fenced_calls: int
    replays: int
    lag_max: int
    overlapped: int
    problem: str = ""


class Bench:
    """All processes of one world."""

    def __init__(self, seed: int, model: Model, parts: Parts | None = None):
        parts = parts or Parts()
        self.model = model
        self.world = World(seed)
        self.net = Net(self.world, model.latency_s)
        self.store = Store(self.world)
        self.server = Process(self.world, "store", "store")
        self.shared = Shared(self.world, self.net, self.store, self.server)
        self.shared.keeps_all, self.shared.store_s = not model.power_cuts, model.store_s
        ends = ("a", "b") if model.standbys else ("a",)
        machines = (model, parts.router, parts.calls)
        self.engines = Engines()
        self.routers = [Router(self.shared, f"router-{n}", *machines, self.engines) for n in ends]
        self.banks = [Bank(self.shared, f"readybank-{n}", model, parts.bank) for n in ends]
        self.trainer = Trainer(self.shared, "trainer-a", model)
        self.hosts = [Host(self.shared, f"host-{n}", model) for n in range(model.hosts)]
        replicas = range(model.replicas)
        self.replicas = [
            parts.replica(self.shared, f"replica-{n}", model, self.engines) for n in replicas
        ]
        self.checks = Checks(self.shared, model, self.trainer, self.hosts)
        self.shared.problem = self.checks.problems.append
        self.leases = LeaseChecks(self.checks, self.engines)
        self.publishing = PublicationChecks(self.checks, model, self.trainer, self.replicas)
        self.states = States(self)
        self.world.states, self.world.has = self.states.now, self.states.has
        self.injector = Injector(self.shared, self.trainer, self.hosts, self.states)
        acked = [router.acked.clear for router in self.routers]
        self.injector.on_power_cut = [self.checks.power_cut, self.leases.power_cut, *acked]
        submit(self.shared, model)
        self.store.undo.settle()
        self.server.begin()
        everyone: Sequence[Process] = (
            *self.replicas,
            *self.hosts,
            *self.routers,
            *self.banks,
            self.trainer,
        )
        for number, process in enumerate(everyone):
            self.shared.add(process)
            self.world.after(0.01 * number, process.begin)

    def plan(self, faults: Sequence[Fault]) -> None:
        """Faults at their times, and the end of them all."""
        for fault in faults:
            self.world.after(fault.at_s, partial(self.injector.plan, fault))
        self.world.after(self.model.faults_until_s, self.injector.heal)

    # the end

    @property
    def left(self) -> int:
        """Groups that may still get a fate."""
        fates = self.checks.facts.fates
        filtered = sum(fate is Fate.FILTERED for fate in fates.values())
        evaluated = sum(fate is Fate.EVALUATED for fate in fates.values())
        return self.allowed(filtered) - len(fates) + evaluated

    def allowed(self, filtered: int) -> int:
        return self.model.groups + min(filtered, self.model.groups)

    def done(self) -> bool:
        if self.world.steps % 16 or self.left >= self.model.groups_per_batch:
            return False
        filtered = sum(f is Fate.FILTERED for f in self.checks.facts.fates.values())
        evaluated = sum(f is Fate.EVALUATED for f in self.checks.facts.fates.values())
        if evaluated < self.model.evaluated:
            return False
        all_opened = len(self.checks.facts.opened) >= self.allowed(filtered) + evaluated
        idle = any(router.idle for router in self.routers)
        return all_opened and idle and not any(host.count for host in self.hosts)

    def _check(self) -> None:
        """After every event."""
        self.checks()
        if self.injector.waiting:
            self.injector.look()

    def run(self) -> None:
        """Raises Violation."""
        until = self.model.faults_until_s + AFTER_HEAL_S
        try:
            ended = self.world.run(self.done, self._check, until_s=until)
        except Violation as problem:
            raise Violation(f"at {self.world.now:.3f} s: {problem}") from problem
        if not ended:
            raise Violation(f"13: no end {AFTER_HEAL_S:.0f} s after the faults: {self.waits()}")
        for router in self.routers:
            for end in router.acked:
                self._still_there(end)

    def _still_there(self, episode: str) -> None:
        group, sibling, attempt = episode.rsplit(".", 2)
        known = self.checks.facts.siblings.get((group, int(sibling)), {}).get(int(attempt))
        if known is None or known.label is None:
            raise Violation(f"1: {episode} was told to be durable, and is not there")

    def waits(self) -> str:
        """For people: what everybody says."""
        facts = self.checks.facts
        text = f"{len(facts.opened)} groups opened, {len(facts.fates)} with a fate"
        for bank in self.banks:
            if bank.machine is not None:
                text += f"; {bank.name}: {bank.told()}"
        for router in self.routers:
            text += f"; {router.name}: {router.told()}"
        boxes = {host.name: host.count for host in self.hosts}
        halts = self.trainer.halts[-2:]
        phase = self.trainer.machine.phase if self.trainer.machine else "down"
        return f"{text}; trainer {phase} {halts}; boxes {boxes}"


def faults_of(seed: int, model: Model) -> tuple[Fault, ...]:
    """The faults of a seed, numbered by their place."""
    if not model.faults_mean:
        return ()
    return draw(
        seed,
        until_s=model.faults_until_s,
        mean=model.faults_mean,
        power_cuts=model.power_cuts,
        only=model.kinds,
        states=STATES,
    )


def simulate(
    seed: int, model: Model, faults: Sequence[Fault] | None = None, parts: Parts | None = None
) -> Result:
    """One run; a violation stands in `problem`."""
    bench = Bench(seed, model, parts)
    planned = faults_of(seed, model) if faults is None else tuple(faults)
    bench.plan(planned)
    problem = ""
    try:
        bench.run()
    except Violation as found:
        problem = str(found)
    return result_of(bench, seed, len(planned), problem)


def result_of(bench: Bench, seed: int, faults: int, problem: str) -> Result:
    facts, world = bench.checks.facts, bench.world
    trained = sum(fate is Fate.TRAINED for fate in facts.fates.values())
    filtered = sum(fate is Fate.FILTERED for fate in facts.fates.values())
    return Result(
        seed=seed,
        trace=world.trace,
        events=world.steps,
        end_s=world.now,
        episodes=facts.episodes,
        steps=len(facts.trained),
        groups_trained=trained,
        groups_filtered=filtered,
        groups_evaluated=len(facts.fates) - trained - filtered,
        void=not problem and facts.episodes < EPISODES_MIN,
        faults=faults,
        fired=dict(sorted(world.fired.items())),
        reach=dict(sorted(world.reach.items())),
        labels=dict(sorted(facts.labels.items())),
        refused_writes=bench.store.refused,
        fenced_calls=sum(host.fenced_calls for host in bench.hosts),
        replays=sum(a.restored for s in facts.siblings.values() for a in s.values()),
        lag_max=bench.leases.lag_max,
        overlapped=bench.publishing.overlapped,
        problem=problem,
    )
