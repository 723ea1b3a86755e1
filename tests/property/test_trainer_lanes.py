"""A trainer whose training and publications overlap, in every order, killed anywhere.

`World` keeps what survives a process; `Life` is one incarnation: lists of commands that are carried
out side by side, one command at a time, in an order drawn from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from muster.transfer.newest import Newest
from services.trainer import schedule as s
from services.trainer.ports import ReplicaReport, Stage, VersionRecord
from tests.unit.trainer.machines import BASE, report

BATCHES = 6
REPLICAS = ("a", "b", "late")


class World:
    """What outlives a trainer."""

    def __init__(self) -> None:
        self.checkpoints: list[tuple[int, VersionRecord]] = [(0, BASE)]
        self.records: dict[tuple[int, Stage], VersionRecord] = {}
        self.step_of: dict[int, int] = {0: 0}  # by version
        self.parent_of: dict[int, int] = {}
        self.serving = dict.fromkeys(REPLICAS, 0)
        self.durable = 0  # as the bank was told

    def line(self) -> list[int]:
        """Steps of the newest checkpoint, first one first."""
        version, found = self.checkpoints[-1][1].version, list[int]()
        while version:
            found.append(self.step_of[version])
            version = self.parent_of[version]
        return found[::-1]


class Life:
    """One incarnation over a world."""

    def __init__(self, world: World, chance: random.Random, *, ahead: int, every: int):
        self.world, self.chance, self.ahead = world, chance, ahead
        self.machine = s.TrainerMachine(
            checkpoint_every=every, checkpoint_idle_s=5.0, ahead_max=ahead
        )
        self.now, self.overlapped, self.failing = 0.0, 0, 0.3
        self.lanes: list[Iterator[None]] = []
        self.snapshots: Newest[int] = Newest()
        self.made, self.ended, self.sending = list[int](), set[int](), 0
        self.sent = dict.fromkeys(REPLICAS, -1)
        self.published = -1
        step, record = world.checkpoints[-1]
        known = [version for version, _ in world.records]
        self.keep(record.version)
        self.feed(s.Started(step, record, max([record.version, *known]) + 1))

    def keep(self, version: int) -> None:
        self.snapshots.keep(version, version)

    def feed(self, event: s.TrainerEvent) -> None:
        commands = self.machine.handle(event, self.now)
        assert not any(isinstance(c, s.Halt) for c in commands)
        if commands:
            self.lanes.append(self.carry_out(commands))

    def step(self) -> bool:
        """Advance one of the lists by one command; False when all have ended."""
        self.now += 0.1
        if not self.lanes:
            return False
        lane = self.chance.choice(self.lanes)
        if next(lane, self) is self:
            self.lanes.remove(lane)
        return True

    def carry_out(self, commands: list[s.Command]) -> Iterator[None]:
        for command in commands:
            yield
            if isinstance(command, s.Publish):
                self.lanes.append(self.publish(command))
                continue
            if isinstance(command, s.TrainStep):
                self.check_may_train()
                yield
            event = self.effect(command)
            yield
            if event is not None:
                self.feed(event)

    def check_may_train(self) -> None:
        behind = [version for version in self.made if version not in self.ended]
        assert len(behind) <= self.ahead, f"versions {behind} are still to be published"
        self.overlapped += self.sending > 0

    def publish(self, command: s.Publish) -> Iterator[None]:
        world, version = self.world, command.version
        assert not self.sending, "two publications at a time"
        assert any(known == version for known, _ in world.records), "sent before its record"
        assert self.snapshots.of(version) == version
        assert version >= self.published
        self.sending += 1
        yield
        reports = []
        for name in self.chance.sample(REPLICAS, len(REPLICAS)):
            if name in command.skip or world.serving[name] == version:
                continue
            failed = self.chance.random() < self.failing
            reports.append(ReplicaReport(name, error="it fails" if failed else ""))
            if not failed:
                assert version >= self.sent[name], "an older version after a newer one"
                self.sent[name] = world.serving[name] = version
            yield
        self.sending -= 1
        # What was made before it and never sent is over with it.
        self.ended |= {v for v in self.made if v <= version}
        serving = sum(at == version for at in world.serving.values())
        self.feed(s.Published(tuple(reports), serving))

    def effect(self, command: s.Command) -> s.TrainerEvent | None:
        world = self.world
        match command:
            case s.SealVersion() | s.SaveCheckpoint():
                return self.make(command)
            case s.RecordVersion(record=record):
                world.records.setdefault((record.version, record.stage), record)
                if record.stage is Stage.PUBLISHED:
                    assert record.version >= self.published, "published in another order"
                    self.published = record.version
                return s.VersionRecorded(record.version, record.stage)
            case s.Register(last_durable_step=step):
                world.durable = max(world.durable, step)
                return s.Registered(step + 1)
            case s.LeaseBatch(step=step):
                return s.BatchLeased(step) if step <= BATCHES else None
            case s.TrainStep(step=step):
                return s.StepTrained(report(step))
            case s.AcknowledgeBatch(step=step):
                assert step <= world.checkpoints[-1][0], "acknowledged before it was durable"
                world.durable = max(world.durable, step)
                return s.BatchAcknowledged(step)
        return None

    def make(self, command: s.SealVersion | s.SaveCheckpoint) -> s.TrainerEvent:
        version, step, world = command.version, command.step, self.world
        if not getattr(command, "digest", ""):
            assert (version, Stage.TRAINED) not in world.records, "a number used twice"
            assert version not in self.made
            self.made.append(version)
            self.keep(version)
            world.step_of[version], world.parent_of[version] = step, command.parent
        record = VersionRecord(version, command.parent, f"d{version}", f"step-{step}")
        record = replace(record, report=command.report)
        if isinstance(command, s.SealVersion):
            record = replace(record, checkpoint="", stage=Stage.TRAINED)
            return s.VersionSealed(step, record)
        world.checkpoints.append((step, record))
        return s.CheckpointSaved(step, record)


def lived(seed: int) -> tuple[World, int]:
    """A world after some killed trainers and one that lived on; how often steps overlapped."""
    chance, world = random.Random(seed), World()
    ahead, every, overlapped = seed % 3, 1 + seed // 3 % 3, 0
    for kill_after in [chance.randrange(80) for _ in range(chance.randrange(4))] + [10_000]:
        life = Life(world, chance, ahead=ahead, every=every)
        quiet = 0
        for _ in range(kill_after):
            if chance.random() < 0.05:
                life.feed(s.ReplicasDue())
            if life.step():
                quiet = 0
                continue
            life.failing, life.now = 0.0, life.now + 5.0
            life.feed(s.ReplicasDue())
            quiet += 1
            if quiet > 60:  # the longest wait of a replica that kept failing is behind us
                break
        overlapped += life.overlapped
    return world, overlapped


@pytest.mark.parametrize("seed", range(150))
def test_whatever_overlaps_every_batch_is_trained_once_and_every_replica_brought_up(
    seed: int,
) -> None:
    world, _ = lived(seed)
    assert world.line() == list(range(1, BATCHES + 1))
    assert world.durable == BATCHES
    newest = world.checkpoints[-1][1].version
    assert set(world.serving.values()) == {newest}
    assert (newest, Stage.PUBLISHED) in world.records


def test_steps_do_overlap_with_publications_in_these_worlds() -> None:
    by_ahead = [sum(lived(seed)[1] for seed in range(first, 60, 3)) for first in range(3)]
    assert by_ahead[1] > 20
    assert by_ahead[2] > by_ahead[1]
