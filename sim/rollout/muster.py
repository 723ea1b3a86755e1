"""One run of an arm on the production machines.

Owns: putting the machines, their actors and the models together, and when a run is over. Promise:
equal (arm, regime, seed, batches) give equal figures and traces; every group that was launched is
followed to its fate when `follow` is asked for. Does not cover: figures (figures.py), baselines.
"""

from __future__ import annotations

from msgspec.structs import asdict, replace

from muster.errors import Refused
from services.readybank.events import Batch
from services.readybank.machine import BankMachine
from services.router import events as e
from services.router.machine import RouterMachine
from services.sandbox.pool import Pool
from sim.rollout import arms
from sim.rollout.arms import Arm
from sim.rollout.bank_actor import BankActor
from sim.rollout.bound import peak_rate
from sim.rollout.checks import Checks
from sim.rollout.costs import EngineCosts
from sim.rollout.engine import EngineModel
from sim.rollout.figures import Fleet, RunFigures, figures
from sim.rollout.heap import Heap
from sim.rollout.measure import Recorder
from sim.rollout.pool_actor import PoolActor
from sim.rollout.router_actor import RouterActor
from sim.rollout.workload import Regime, Workload

AHEAD_BATCHES = 6
"""Batches that a job has beyond those that are measured, so that none of these is made of the last
groups of a job."""

GIVE_UP_S = 1e6
PUBLISHED = EngineCosts()


class World:
    """All of one run; `run` it. `batches` are measured, from the first launch on. checks: look
    after every event whether what must hold does. trace: hash what happens.
    """

    def __init__(
        self,
        arm: Arm,
        regime: Regime,
        seed: int,
        batches: int,
        *,
        checks: bool = False,
        trace: bool = False,
        costs: EngineCosts = PUBLISHED,
    ):
        self.arm, self.regime, self.seed, self.batches = arm, regime, seed, batches
        self.heap = Heap(seed, trace=trace)
        self.workload = Workload(regime, seed)
        self.models = {
            f"replica-{n}": EngineModel(kv_tokens=regime.kv_tokens, costs=costs)
            for n in range(regime.replicas)
        }
        self.recorder = Recorder(
            group_size=regime.group_size,
            replicas=regime.replicas,
            peak_rate=peak_rate(regime, costs),
        )
        self.fleets: list[Fleet] = []
        self._traced, self._over, self._last = trace, False, batches
        pools = {f"host-{n}": Pool(arms.pool_rules(arm, regime)) for n in range(arms.HOSTS)}
        self.pool = PoolActor(self.heap, pools, warm=arm.has("boxes"))
        self.bank = BankActor(BankMachine(arms.bank_rules(arm, regime)), self.heap, regime.groups)
        # The router predicts by what the engines cost, as a fitted run would be configured.
        rules = replace(arms.router_rules(arm, regime), **asdict(costs))
        self.router = RouterActor(
            RouterMachine(rules),
            self.heap,
            self.models,
            self.pool,
            self.bank,
            self.workload,
            self.recorder,
        )
        self.pool.router = self.bank.router = self.router
        self.bank.on_batch, self.bank.on_filtered = self._cut, self._filtered
        talks = self.router.talks
        self.checks = Checks(rules, regime.group_size, self.models, talks) if checks else None
        if trace or checks:
            self.router.watch = self._watch

    def run(self, *, follow: bool = True) -> None:
        """Until `batches` are cut; with `follow`, until each group of the job has its fate."""
        wanted = self.batches + AHEAD_BATCHES
        self.bank.start()
        self.router.start(
            arms.job(self.regime, wanted * self.regime.groups), tuple(self.pool.pools)
        )
        self._last = wanted if follow else self.batches
        self.heap.after(GIVE_UP_S, self._look)
        self.heap.run(lambda: self._over)
        cut = len(self.bank.batches)
        if cut < self._last:
            raise Refused(
                f"no batch within {GIVE_UP_S:g} simulated seconds after {cut} of {self._last}",
                field="arm",
                value=self.arm.name,
                way_out="look at router.machine.explain() and bank.machine of this run",
            )

    def _look(self) -> None:
        """Give up when nothing was cut for long: ticks alone never end."""
        cut = self.bank.batches
        due = (cut[-1][0] if cut else 0.0) + GIVE_UP_S
        self._over = self._over or due <= self.heap.now
        self.heap.at(due, self._look)

    def figures(self) -> RunFigures:
        """After `run`."""
        arm, regime = self.arm.name, self.regime.name
        return figures(self.recorder, self.fleets, arm=arm, regime=regime, seed=self.seed)

    def _cut(self, batch: Batch) -> None:
        if self.checks is not None:
            self.checks.batch(batch)
        self._over = batch.step >= self._last
        groups = [_index(member.group) for member in batch.members]
        now = self.heap.now
        if len(self.fleets) == self.batches:
            for group in groups:
                self.recorder.completed_after(group, now)
            return
        self.router.sample()
        models = self.models.values()
        prefilled = sum(model.prefilled_tokens for model in models)
        self.recorder.engines(prefilled, sum(model.recomputed_tokens for model in models))
        self.recorder.cut(groups, now)
        self.fleets.append(
            Fleet(
                at=now,
                busy_s=tuple(model.busy_s for model in models),
                sampled_tokens=sum(model.sampled_tokens for model in models),
                prefilled_tokens=prefilled,
            )
        )

    def _filtered(self, group: str) -> None:
        self.recorder.dropped(_index(group))

    def _watch(self, event: e.RouterEvent, commands: list[e.RouterCommand]) -> None:
        if self.checks is not None:
            self.checks.before(event, commands, self.heap.now)
        if self._traced:
            self.heap.note(f"{event!r} {commands!r}")


def _index(group: str) -> int:
    return int(group.rpartition("-")[2])
