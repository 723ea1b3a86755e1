"""Whatever replicas say, and in whatever order: none takes a turn that is not proven in this life.

A dumb book-keeper follows each replica: which life passed a probe, when it was last heard, whether
its conversations were named as lost.
"""

from __future__ import annotations

import os
import random

import pytest

from services.router.events import ReplicaProbed, ReplicaSilent, ReplicaTold
from services.router.health import Health
from services.router.rules import RouterRules

SEEDS = int(os.environ.get("MUSTER_TEST_EXAMPLES", "300")) // 3
STEPS = 300
TTL_S, WEDGE_S = 10.0, 20.0
REPLICAS = ("r1", "r2", "r3")


class Books:
    """One random history of three replicas."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.rules = RouterRules(
            run="r", owner_epoch=1, probes=True, wedge_s=WEDGE_S, probe_timeout_s=4.0
        )
        self.health = Health(self.rules)
        self.now, self.version = 0.0, 0
        self.lives = dict.fromkeys(REPLICAS, 0)
        self.steps = dict.fromkeys(REPLICAS, 0)
        self.announced: set[str] = set()
        self.proven: set[tuple[str, str]] = set()  # replica and life of passed probes
        self.heard: dict[str, ReplicaTold] = {}
        self.heard_at: dict[str, float] = {}
        self.asked: list[tuple[str, str, float]] = []  # probes on their way, since when
        self.may_hold: set[str] = set()  # replicas that took turns since they were named as lost

    def step(self) -> None:
        self.now += self.chance.choice([0.0, 0.5, 1.0, 3.0, 12.0])
        act = self.chance.choices(
            [self.tell, self.keep_silent, self.probe_ends, self.announce, self.restart, self.fail],
            [12, 2, 6, 2, 1, 2],
        )[0]
        act(self.chance.choice(REPLICAS))
        self.lost(self.health.lost(self.now))
        for probe in self.health.due(self.now):
            assert probe.replica in self.announced
            assert probe.life == self.heard[probe.replica].life
            name = (probe.replica, probe.life)
            given_up = [one for one in self.asked if one[:2] == name]
            assert all(self.now - one[2] > probe.timeout_s for one in given_up), "two at once"
            self.asked = [one for one in self.asked if one[:2] != name]
            self.asked.append((*name, self.now))
        self.check()

    def tell(self, replica: str) -> None:
        if self.chance.random() < 0.1:
            self.version += 1
        self.steps[replica] += self.chance.choice([0, 5])
        told = ReplicaTold(
            replica=replica,
            life=f"{replica}-{self.lives[replica]}",
            version=max(0, self.version - self.chance.choice([0, 0, 0, 1])),
            serving=self.chance.random() < 0.9,
            credit_tokens=100,
            ttl_s=TTL_S,
            block_size=16,
            running=self.chance.choice([0, 2]),
            steps=self.steps[replica],
        )
        self.lost(self.health.told(told, self.version, self.now))
        self.heard[replica], self.heard_at[replica] = told, self.now

    def keep_silent(self, replica: str) -> None:
        self.health.silent(ReplicaSilent(replica, "no answer"), self.now)

    def probe_ends(self, replica: str) -> None:
        if not self.asked:
            return
        asked, life, _ = self.asked.pop(self.chance.randrange(len(self.asked)))
        passed = self.chance.random() < 0.7
        self.health.probed(ReplicaProbed(asked, life, passed), self.now)
        if passed:
            self.proven.add((asked, life))

    def announce(self, replica: str) -> None:
        self.announced ^= {replica}
        gone = self.health.listed(sorted(self.announced), self.now)
        assert not set(gone) & self.announced
        self.lost(gone)

    def restart(self, replica: str) -> None:
        self.lives[replica] += 1

    def fail(self, replica: str) -> None:
        self.health.failed(replica, self.now)

    def lost(self, replicas: tuple[str, ...]) -> None:
        for replica in replicas:
            self.may_hold.discard(replica)
            assert not self.health.admits(replica, self.now), "lost, and takes turns"
        forgotten = set(replicas) - self.announced
        self.asked = [probe for probe in self.asked if probe[0] not in forgotten]

    def check(self) -> None:
        for replica in REPLICAS:
            if not self.health.admits(replica, self.now):
                assert self.health.why(replica, self.now), "takes no turn, and nobody knows why"
                continue
            self.may_hold.add(replica)
            heard = self.heard[replica]
            assert replica in self.announced
            assert (replica, heard.life) in self.proven, "not proven in this life"
            assert heard.serving
            assert self.now < self.heard_at[replica] + TTL_S, "its credit is over"

    def settle(self) -> None:
        """From here on all are well: each takes turns again soon, and nothing is lost."""
        self.asked.clear()
        self.lost(self.health.listed(REPLICAS, self.now))
        self.announced = set(REPLICAS)
        until = self.now + 3 * self.rules.probe_pause_max_s
        while self.now < until:
            for replica in REPLICAS:
                self.steps[replica] += 1
                life = f"{replica}-{self.lives[replica]}"
                told = ReplicaTold(replica, life, self.version, True, 100, TTL_S, 16)
                self.lost(self.health.told(told, self.version, self.now))
            for probe in self.health.due(self.now):
                self.health.probed(ReplicaProbed(probe.replica, probe.life, True), self.now)
            self.lost(self.health.lost(self.now))
            self.now += 1.0
        assert all(self.health.admits(replica, self.now) for replica in REPLICAS)


@pytest.mark.parametrize("part", range(3))
def test_only_what_is_proven_in_this_life_takes_turns(part: int) -> None:
    for seed in range(part, SEEDS, 3):
        books = Books(seed)
        for _ in range(STEPS):
            books.step()
        books.settle()
