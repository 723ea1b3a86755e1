"""Placement policies against each other: the same groups, one policy at a time.

Owns: the cases (KV pressure, a replica that dies, weights that change), one run of a policy, its
figures. Promise: equal (arm, case, seed) give equal figures; every arm meets the same groups,
boxes that start in the same way, and the same faults at the same times. Does not cover: comparing
arms (bench/routing.py), batches (muster.py): here a fixed number of groups is submitted at second
0, and each is over when all its siblings are.

KV pressure: tokens of as many mean contexts as there are boxes, over the KV of all replicas; the
KV of a case is set by it, seed by seed, so that a seed of long episodes is not a harder one.
"""

from __future__ import annotations

import math
from statistics import fmean

from msgspec.structs import replace

from muster.types import Value
from services.router import events as e
from sim.rollout import arms
from sim.rollout.arms import Arm
from sim.rollout.muster import World
from sim.rollout.workload import TB_LIKE, Regime, Workload

OTHERS = (
    "round_robin",
    "least_loaded",
    "consistent_hash",
    "cache_aware",
    "sticky_least_loaded",
    "overlap_cost",
)
OURS, ALONE = "muster", "predicted_finish"
NAMES = (OURS, ALONE, *OTHERS)

_NOTICED_S = 5.0  # from a replica's death to its leaving the list
_END_S = 1e6  # nothing takes that long


class Case(Value, frozen=True):
    """What the policies are compared in. Times in seconds from the submission; 0: never.

    `context_limit`: where caches are cleared, requests in flight are prefilled again, so that a
    context whose prefill takes longer than the time between two updates would never end.
    """

    name: str
    pressure: float
    killed_at_s: float = 0.0
    update_every_s: float = 0.0
    context_limit: int = TB_LIKE.context_limit


CASES = (
    Case("pressure_0_5", 0.5),
    Case("pressure_1", 1.0),
    Case("pressure_2", 2.0),
    Case("killed", 1.0, killed_at_s=300.0),
    Case("updates", 1.0, update_every_s=120.0, context_limit=65_536),
)


class Figures(Value, frozen=True):
    """One policy in one case under one seed."""

    arm: str
    case: str
    seed: int
    group_finish_s: float  # mean over groups, from the submission to the end of the last sibling
    all_finish_s: float
    prefilled_tokens: int
    recomputed_tokens: int
    busy: float  # busiest replica over the mean of all
    migrations: int
    turns: int


def arm_of(name: str) -> Arm:
    """Ours holds conversations that do not fit; the others let everybody go on, as published."""
    if name == OURS:
        return arms.MUSTER
    return Arm(name, ("boxes", "assembly"), placement=name, admission="none")


def size(groups: int) -> Regime:
    """Half the fleet of the simulated workload, and boxes for half of the groups at a time."""
    replicas = max(2, groups // 8)
    return replace(
        TB_LIKE, replicas=replicas, boxes=groups * TB_LIKE.group_size // 2, cold_at_once=512
    )


def pressed(regime: Regime, case: Case, seed: int, groups: int) -> Regime:
    """The regime with the KV of the case; any context fits one replica alone."""
    regime = replace(regime, context_limit=case.context_limit)
    workload = Workload(regime, seed)
    plans = (workload.plan(g, s, 0) for g in range(groups) for s in range(regime.group_size))
    context = fmean((regime.prompt_tokens + plan.tokens) / 2 for plan in plans)
    kv = regime.boxes * context / regime.replicas / case.pressure
    least = regime.context_limit + 4_096
    return replace(regime, kv_tokens=max(least, math.ceil(kv)))


class Race:
    """One policy, one case, one seed."""

    def __init__(self, name: str, case: Case, seed: int, groups: int):
        self._case, self._groups = case, groups
        self._regime = pressed(size(groups), case, seed, groups)
        self._arm = arm_of(name)
        self._world = World(self._arm, self._regime, seed, 1)
        self._seed = seed
        self._open: dict[str, int] = {}  # group → siblings without an end
        self._finished: dict[str, float] = {}
        self._at: dict[str, str] = {}  # episode → replica of its newest turn
        self._migrations = 0
        self._version = 0
        self._world.router.watch = self._watch

    def run(self) -> Figures:
        """To the end of the last group."""
        world, case = self._world, self._case
        if case.killed_at_s:
            world.heap.at(case.killed_at_s, self._kill)
        if case.update_every_s:
            world.heap.at(case.update_every_s, self._update)
        world.bank.start()
        world.router.start(arms.job(self._regime, self._groups), tuple(world.pool.pools))
        world.heap.run(self._over)
        if len(self._finished) < self._groups:
            raise RuntimeError(f"{self._arm.name}, {case.name}, {self._seed}: it never ends")
        busy = [model.busy_s for model in world.models.values()]
        return Figures(
            arm=self._arm.name,
            case=case.name,
            seed=self._seed,
            group_finish_s=fmean(self._finished.values()),
            all_finish_s=max(self._finished.values()),
            prefilled_tokens=sum(m.prefilled_tokens for m in world.models.values()),
            recomputed_tokens=sum(m.recomputed_tokens for m in world.models.values()),
            busy=max(busy) / fmean(busy),
            migrations=self._migrations,
            turns=world.router.turns,
        )

    def _over(self) -> bool:
        return len(self._finished) >= self._groups or self._world.heap.now > _END_S

    def _watch(self, event: e.RouterEvent, commands: list[e.RouterCommand]) -> None:
        for command in commands:
            if isinstance(command, e.Generate):
                key = command.episode.id
                self._migrations += self._at.get(key, command.replica) != command.replica
                self._at[key] = command.replica
            elif isinstance(command, e.RecordEpisode) and self._last(command):
                group = command.episode.group
                left = self._open.get(group, self._regime.group_size) - 1
                self._open[group] = left
                if not left:
                    self._finished[group] = self._world.heap.now

    def _last(self, command: e.RecordEpisode) -> bool:
        """Whether the sibling is over: also when its attempts are used up without a valid end."""
        repairs_max = self._world.router.machine.rules.repairs_max
        return command.label.outcome.valid or command.episode.attempt >= repairs_max

    def _kill(self) -> None:
        self._world.router.kill("replica-1")
        self._world.heap.after(_NOTICED_S, self._noticed)

    def _noticed(self) -> None:
        left = [name for name in self._world.models if name != "replica-1"]
        self._world.router.feed(e.ReplicasListed(tuple(e.Replica(r, r) for r in left)))

    def _update(self) -> None:
        """New weights: every cache is cleared, and the router is told at once."""
        world = self._world
        self._version += 1
        for model in world.models.values():
            model.clear(world.heap.now)
        world.router.version = self._version
        world.router.tell()
        world.router.feed(e.VersionPublished(self._version, self._version))
        world.heap.after(self._case.update_every_s, self._update)
