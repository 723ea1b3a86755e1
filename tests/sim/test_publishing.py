"""Training and publication overlap in a calm world, and each check of publications can fail."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.trainer.events import CheckpointSaved, Command, Publish, RecordVersion
from services.trainer.outgoing import Outgoing
from services.trainer.schedule import TrainerMachine
from sim.experiment import Bench, simulate
from sim.models import CALM

# Publications take longer than steps, and batches are there at once.
BUSY = replace(CALM, groups_per_batch=2, lag_max=4, train_s=0.5, publish_s=4.0, ahead_max=1)


def test_steps_are_trained_while_versions_are_on_their_way() -> None:
    result = simulate(2, BUSY)
    assert result.problem == ""
    assert result.overlapped >= 3
    assert simulate(2, replace(BUSY, ahead_max=0)).overlapped == 0


def test_a_trainer_that_waits_for_no_publication_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outgoing, "behind", 0)
    assert "are unpublished" in simulate(2, BUSY).problem


def test_a_version_that_is_sent_before_its_record_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(machine: TrainerMachine, event: CheckpointSaved) -> list[Command]:
        machine._now_durable(event.step, event.record, event.oldest_kept)
        machine.outgoing.made(event.record, 0.0, 0.0)
        return [*machine.outgoing.next(0.0), RecordVersion(event.record)]

    monkeypatch.setattr(TrainerMachine, "_on_saved", early)
    assert "is of no record" in simulate(2, replace(BUSY, ahead_max=0, publish_s=0.1)).problem


def test_a_replica_that_gets_an_older_version_after_a_newer_one_is_seen() -> None:
    bench = Bench(2, CALM)
    replica = bench.replicas[0]
    for version in (3, 2):
        replica.version = version
        replica.on_served(replica, 1)
    assert bench.checks.problems == ["8: replica-0 got 2 after 3"]
    replica.on_served(replica, 2)  # of the next trainer, which may have gone back
    assert len(bench.checks.problems) == 1


def test_a_version_that_is_still_on_its_way_is_of_the_trainer_that_sent_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(2, CALM)
    trainer = bench.trainer
    assert bench.world.run(lambda: bool(trainer.unpublished), bench._check, until_s=5.0)
    of, arrives = trainer.epoch, []
    monkeypatch.setattr(bench.shared.net, "call", lambda *words: arrives.append(words[3]))
    trainer._publish(Publish(0, -1))
    trainer.epoch += 1  # it has died and come back before the request arrives
    told: list[object] = []
    for replica, arrive in zip(bench.replicas, arrives, strict=True):
        replica.version, replica.trainer_epoch = 1, of + 1
        arrive(told.append)
    assert [str(answer) for answer in told] == ["a newer trainer has published"] * len(arrives)


def test_a_checkpoint_whose_batch_the_store_lost_as_well_is_not_lost_too() -> None:
    bench = Bench(2, BUSY)
    trainer = bench.trainer
    assert bench.world.run(lambda: len(trainer.disk) >= 3, bench._check, until_s=60.0)
    kept = len(trainer.disk)
    asked, came = trainer._came[trainer.disk[-1].step]
    trainer.store.cut_at = [came + 0.5]
    assert not trainer.roll_back()
    trainer.store.cut_at = [asked - 0.5, came + 1.5]
    assert trainer.roll_back()
    assert len(trainer.disk) == kept - 1
