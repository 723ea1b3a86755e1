"""The router's machine under random, late and doubled answers, against a dumb book-keeper.

First a rough while (refusals, losses, fleets that come and go, cancellations), then a fair one, in
which everything is answered in order. What must hold all the time is checked at each step; at the
end every job has ended and nothing is left counted, boxed or waiting.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest

from muster.types import Fate, Purpose, VerdictStatus
from services.router import events as e
from services.router.admission import open_groups_max
from services.router.machine import RouterMachine
from services.router.rules import RouterRules
from tests.unit.router.world import BLOCK, failed, generated, job, stepped, verdict

REPLICAS, HOSTS = ("r0", "r1"), ("h0", "h1")
# Of each of the 4 settings; MUSTER_TEST_EXAMPLES is for all of them together.
SEEDS = int(os.environ.get("MUSTER_TEST_EXAMPLES", "280")) // 4
ROUGH_STEPS, FAIR_STEPS = 400, 3000


class Books:
    """Drives one machine and keeps count of all that it asked for."""

    def __init__(self, seed: int, *, doubled: float, cancels: bool, seats: bool = False):
        self.chance = random.Random(seed)
        pick = self.chance.choice
        self.rules = RouterRules(
            run="r",
            owner_epoch=1,
            groups_per_batch=pick([1, 2, 3]),
            lag_max=pick([0, 1]),
            episodes_max=pick([2, 5, 64]),
            turns_max=3,
            generate_retries_max=pick([0, 2]),
            box_retries_max=3,
            repairs_max=pick([0, 1, 2]),
            episode_timeout_s=pick([3.0, 30.0]),
            hold_max_s=pick([5.0, 100.0]),
            placement=pick(["predicted_finish", "least_loaded"])
            if seats
            else "sticky_least_loaded",
            admission=pick(["kv_fit", "hold_resume", "pressure"]) if seats else "none",
            probes=seats,
            reserve_tokens=10,
            fair_hold_s=pick([3.0, 1e9]),
            keepalive_tokens=10,
            interleave_groups=pick([1, 2, 8]),
        )
        self.lives: Counter[str] = Counter()
        self.listed: tuple[str, ...] = ()
        self.machine = RouterMachine(self.rules)
        self.doubled, self.cancels, self.fair = doubled, cancels, False
        self.now, self.version = 0.0, 0
        self.pending: list[e.RouterEvent] = []
        self.boxes: dict[str, tuple[str, str]] = {}  # box → host, attempt
        self.boxed = 0
        self.once: Counter[tuple[object, ...]] = Counter()
        self.conversations: set[str] = set()
        self.jobs: list[str] = []
        self.fleet(REPLICAS, HOSTS)
        self.feed(e.RecoveryEnded())

    def fleet(self, replicas: tuple[str, ...], hosts: tuple[str, ...]) -> None:
        self.listed = replicas
        self.feed(e.ReplicasListed(tuple(e.Replica(r, r) for r in replicas)))
        self.ask()
        self.feed(e.HostsListed(tuple(e.Host(h, h) for h in hosts)))

    def ask(self) -> None:
        """Each replica for its credit, which is small, as often as not in vain."""
        for replica in self.listed if self.rules.probes else ():
            if self.unlucky(0.3):
                self.feed(e.ReplicaSilent(replica, "away"))
                continue
            self.lives[replica] += self.unlucky(0.1)
            serving = not self.unlucky(0.1)
            tokens = self.chance.choice([30, 60]) if serving else 0
            at = (replica, f"life{self.lives[replica]}", self.version, serving, tokens)
            self.feed(e.ReplicaTold(*at, ttl_s=self.chance.choice([1.0, 9.0]), block_size=16))

    def feed(self, event: e.RouterEvent) -> None:
        for command in self.machine.handle(event, self.now):
            answer = self.act(command)
            if answer is not None:
                self.pending.append(answer)
        self.check()

    def only_once(self, *what: object) -> None:
        self.once[what] += 1
        assert self.once[what] == 1, f"a second time: {what}"

    def unlucky(self, probability: float) -> bool:
        return not self.fair and self.chance.random() < probability

    # -- the other services --------------------------------------------------------------

    def act(self, command: e.RouterCommand) -> e.RouterEvent | None:
        match command:
            case e.OpenGroup():
                self.only_once("opened", command.group)
                self.check_bound()
                return e.GroupRecorded(command.group)
            case e.AcquireBox():
                return self.acquire(command)
            case e.Generate():
                return self.generate(command)
            case e.Exec():
                assert command.box in self.boxes, "a step in a box that is gone"
                if self.unlucky(0.1):
                    loss = self.chance.choice(list(e.Loss))
                    return e.StepFailed(command.episode, command.turn, "lost", loss, command.box)
                return stepped(command, box_broken=self.chance.random() < 0.05)
            case e.RecordIntent():
                return e.IntentRecorded(command.episode, command.turn)
            case e.RecordRestored():
                return e.RestoredRecorded(command.episode, command.repair)
            case e.RecordTurn():
                return e.TurnRecorded(command.episode, command.turn)
            case _:
                return self.end(command)

    def acquire(self, command: e.AcquireBox) -> e.RouterEvent:
        if self.unlucky(0.3):
            again = self.chance.random() < 0.7
            return e.BoxRefused(command.episode, command.host, "full", again)
        self.boxed += 1
        mine = (command.host, command.episode.id)
        if command.fresh:
            self.boxes = {b: whose for b, whose in self.boxes.items() if whose != mine}
        self.boxes[f"b{self.boxed}"] = mine
        return e.BoxAcquired(command.episode, command.host, f"b{self.boxed}", self.now, self.now)

    def generate(self, command: e.Generate) -> e.RouterEvent:
        self.conversations.add(command.episode.id)
        self.only_once("generate", command.episode.id, command.turn, command.retry)
        if self.unlucky(0.25):
            return failed(command, full=self.chance.random() < 0.5)
        if self.chance.random() < 0.05:
            return e.ContextFull(command.episode, command.turn)
        tokens = self.chance.choice([5, 15, 40])
        text = self.chance.choice([BLOCK, BLOCK, "DONE", "hmm"])
        return generated(command, text, prompt_tokens=tokens)

    def end(self, command: Any) -> e.RouterEvent | None:
        match command:
            case e.Verify():
                assert command.box in self.boxes, "a verdict in a box that is gone"
                if self.unlucky(0.2):
                    loss = self.chance.choice(list(e.Loss))
                    return e.VerifyFailed(command.episode, "away", loss)
                odd = self.chance.choice(list(VerdictStatus))
                status = odd if self.unlucky(0.3) else VerdictStatus.REWARDED
                return verdict(command, self.chance.choice([0.0, 1.0]), status)
            case e.ProbeReplica():
                passed = not self.unlucky(0.2)
                return e.ReplicaProbed(command.replica, command.life, passed, "", 0.1)
            case e.Touch():
                assert command.episode.id in self.conversations
            case e.RecordEpisode():
                self.only_once("recorded", command.episode.id)
                return e.EpisodeRecorded(command.episode)
            case e.ReleaseBox():
                self.only_once("released", command.box)
                self.boxes.pop(command.box, None)  # a fresh one may have ended it
            case e.DropConversation():
                self.conversations.discard(command.episode.id)
        return None

    # -- what always holds ---------------------------------------------------------------

    def check(self) -> None:
        machine = self.machine
        live = [(x.key.group, x.key.sibling) for x in machine._episodes.values()]
        assert len(live) == len(set(live)), "two live attempts of one sibling"
        assert len(live) <= self.rules.episodes_max
        waiting = list(machine._groups.order)
        assert len(waiting) == len(set(waiting)), "a sibling waits twice"
        for group, sibling in waiting:
            known = machine._groups.open.get(group)
            assert known is None or known.siblings[sibling].label is None, "a final one waits"

    def check_bound(self) -> None:
        most = open_groups_max(
            lag_max=self.rules.lag_max,
            published_step=self.version,
            steps_trained=self.version,
            groups_per_batch=self.rules.groups_per_batch,
        )
        groups = self.machine._groups
        open_ = len(groups.open) - len(groups.evaluating)
        assert open_ <= most, "more groups are open than the bound allows"
        held = [g for g in groups.open.values() if g.evaluates]
        assert {g.id for g in held} == groups.evaluating.keys()
        most = self.rules.episodes_max + max((len(g.siblings) for g in held), default=0)
        assert sum(len(g.siblings) for g in held) < most, "more are evaluated than can run"

    # -- time passes ---------------------------------------------------------------------

    def answer(self) -> bool:
        if not self.pending:
            return False
        index = 0 if self.fair else self.chance.randrange(len(self.pending))
        event = self.pending.pop(index)
        self.feed(event)
        # A box that is given twice would be two boxes: the host's ledger rules that out.
        if self.unlucky(self.doubled) and not isinstance(event, e.BoxAcquired):
            self.feed(event)
        return True

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.ask()
        self.feed(e.Tick())

    def rough_step(self) -> None:
        x = self.chance.random()
        if x < 0.7 and self.answer():
            return
        if x < 0.85:
            self.tick(self.chance.choice([0.3, 0.6, 2.0]))
        elif x < 0.88 and len(self.jobs) < 4:
            self.jobs.append(f"j{len(self.jobs)}")
            purpose = self.chance.choice([Purpose.TRAIN, Purpose.TRAIN, Purpose.EVALUATE])
            groups = self.chance.choice([1, 3])
            self.feed(job(self.jobs[-1], groups=groups, max_turns=2, purpose=purpose))
        elif x < 0.90 and self.jobs and self.cancels:
            self.feed(e.JobCancelled(self.chance.choice(self.jobs)))
        elif x < 0.94:
            self.train()
        else:
            some = [tuple(n for n in names if not self.unlucky(0.2)) for names in (REPLICAS, HOSTS)]
            self.fleet(*some)

    def train(self) -> None:
        """As bank and trainer would: whole groups in batches, the hopeless filtered."""
        groups = list(self.machine._groups.open.values())
        for group in [g for g in groups if g.evaluates and self.ended(g)]:
            self.feed(e.FateRecorded(group.id, Fate.EVALUATED))
        groups = [group for group in groups if not group.evaluates or not group.complete]
        for group in groups:
            hopeless = group.complete and not any(
                s.label is not None and s.label.outcome.valid for s in group.siblings
            )
            if hopeless or (self.machine._groups.jobs[group.job].cancelled and group.recorded):
                self.feed(e.FateRecorded(group.id, Fate.FILTERED))
        open_ = self.machine._groups.open
        good = [g for g in groups if g.complete and g.id in open_ and not g.evaluates]
        wanted = self.rules.groups_per_batch
        wanted = min(len(good), wanted) if self.fair else wanted
        if wanted and len(good) >= wanted:
            step = self.version + 1
            for group in good[:wanted]:
                self.feed(e.FateRecorded(group.id, Fate.TRAINED, step))
            self.feed(e.BatchTrained(step))
            self.version = step
            self.feed(e.VersionPublished(step, step))

    def ended(self, group: Any) -> bool:
        """As far as the bank can read: an end is durable before its router is told."""
        repairs = self.rules.repairs_max
        told = {x.episode.id for x in self.pending if isinstance(x, e.EpisodeRecorded)}
        for number, sibling in enumerate(group.siblings):
            episode = self.machine._episodes.get(f"{group.id}.{number}.{sibling.attempt}")
            label = sibling.label
            if episode is not None and episode.id in told:
                label = episode.label
            if label is None or not (label.outcome.valid or sibling.attempt >= repairs):
                return False
        return True

    def run(self) -> None:
        for _ in range(ROUGH_STEPS):
            self.rough_step()
        self.fair = True
        self.fleet(REPLICAS, HOSTS)
        for _ in range(FAIR_STEPS):
            if not self.answer():
                self.tick(0.6)
                self.train()
            idle = not (self.pending or self.machine._episodes or self.machine._groups.open)
            if idle and not self.machine.jobs_running():
                return
        raise AssertionError(f"stalled: {[self.machine.progress(j, self.now) for j in self.jobs]}")


@pytest.mark.parametrize(
    ("doubled", "cancels", "seats"),
    [(0.0, False, False), (0.0, True, False), (0.1, False, False), (0.1, True, True)],
    ids=str,
)
def test_whatever_happens_every_job_ends_and_nothing_is_left(
    doubled: float, cancels: bool, seats: bool
) -> None:
    for seed in range(SEEDS):
        books = Books(seed, doubled=doubled, cancels=cancels, seats=seats)
        try:
            books.run()
            fleet = books.machine._fleet
            assert not any(fleet.hosts.boxes.values()), "hosts still count boxes"
            assert not fleet.loads.asked, "replicas still count requests"
            assert not fleet.loads.homes
            assert fleet.seats is None or not list(fleet.seats.programs())
            assert not books.boxes, "boxes were never given back"
            assert not books.conversations
            assert not books.machine._groups.order
        except AssertionError as problem:
            raise AssertionError(f"seed {seed}: {problem}") from problem
