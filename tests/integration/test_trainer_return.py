"""A trainer that goes back, by a crash or on purpose, against a real bank: what its checkpoint has
not seen comes again, unchanged and in order, and nothing else does.

The policy is the fake one: its checkpoint lists the steps that it was trained on.
"""

from __future__ import annotations

import json
import signal

from redis.asyncio import Redis

from muster.streams import RunStreams
from muster.v1 import events_pb2 as ev
from sim.builders import scored
from tests.integration.test_trainer import Processes, ended, model, processes

__all__ = ["model", "processes"]  # fixtures


def settings(processes: Processes, *lines: str) -> None:
    """Add lines to the trainer's section, which is the last."""
    config = processes.bank.config
    config.write_text("\n".join([config.read_text(), *lines, ""]))


async def train(processes: Processes, *steps: int) -> None:
    for step in steps:
        await processes.router.group(f"g-{step}", scored(1.0), scored(0.0))


async def records(redis: Redis, run: str) -> list[tuple[int, int, int]]:
    """(version, parent, step) of every version that was made, in the order of the stream."""
    found = [
        ev.PolicyVersionRecord.FromString(message.data)
        for message in await RunStreams(redis, run).read_all("versions")
    ]
    return [(r.version, r.parent, r.step.step) for r in found if r.version]


async def frozen(redis: Redis, run: str) -> list[tuple[int, list[str]]]:
    found = [
        ev.BatchRecord.FromString(message.data)
        for message in await RunStreams(redis, run).read_all("batches")
    ]
    return [
        (r.step, [m.group for m in r.members]) for r in found if r.stage == ev.BATCH_STAGE_FROZEN
    ]


def trained_on(processes: Processes, step: int) -> list[int]:
    path = processes.checkpoints / f"step-{step:06d}" / "fake.json"
    found: list[int] = json.loads(path.read_text("utf-8"))
    return found


FAKE = ('policy = "fake"', 'transport = "none"')


async def test_a_return_on_purpose_gives_again_what_the_older_checkpoint_had_not_seen(
    processes: Processes, redis: Redis, run: str
) -> None:
    settings(processes, *FAKE, "checkpoints_kept = 3")
    with ended(processes):
        processes.bank.start()
        processes.start_trainer()
        await train(processes, 1, 2, 3)
        await processes.fates(3)
        assert processes.end_trainer(signal.SIGTERM) == 0
        settings(processes, "start_step = 1")
        processes.start_trainer()
        await train(processes, 4)
        await processes.fates(4)
        assert processes.end_trainer(signal.SIGTERM) == 0
    made = [(1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 1, 2), (5, 4, 3), (6, 5, 4)]
    assert await records(redis, run) == made
    assert trained_on(processes, 4) == [1, 2, 3, 4]
    assert await frozen(redis, run) == [(step, [f"g-{step}"]) for step in (1, 2, 3, 4)]
    aside = sorted(path.name for path in processes.checkpoints.glob("aside-*"))
    assert aside == ["aside-000002-step-000002", "aside-000002-step-000003"]


async def test_a_kill_between_checkpoints_trains_again_what_was_not_durable(
    processes: Processes, redis: Redis, run: str
) -> None:
    settings(processes, *FAKE, "checkpoint_every = 2")
    with ended(processes):
        processes.bank.start()
        processes.start_trainer()
        await train(processes, 1, 2, 3)
        await processes.record(3, ev.VERSION_STAGE_TRAINED)
        processes.end_trainer(signal.SIGKILL)
        assert len(await processes.fates(2)) == 2  # step 3 is not durable: no fate
        processes.start_trainer()
        await train(processes, 4)
        await processes.fates(4)
        assert processes.end_trainer(signal.SIGTERM) == 0
    made = [(1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 2, 3), (5, 4, 4)]
    assert await records(redis, run) == made
    assert trained_on(processes, 4) == [1, 2, 3, 4]
    assert await frozen(redis, run) == [(step, [f"g-{step}"]) for step in (1, 2, 3, 4)]


async def test_the_last_step_of_a_job_is_saved_when_no_batch_follows(
    processes: Processes,
) -> None:
    """Else its groups would never get their fate, and the job would never end."""
    settings(
        processes, *FAKE, "checkpoint_every = 3", "checkpoint_idle_s = 0", "replica_check_s = 0.1"
    )
    with ended(processes):
        processes.bank.start()
        processes.start_trainer()
        await train(processes, 1)
        assert await processes.fates(1) == [("g-1", ev.FATE_TRAINED, 1)]
        assert processes.end_trainer(signal.SIGTERM) == 0
    assert trained_on(processes, 1) == [1]


async def test_an_epoch_that_a_power_cut_took_back_is_not_used_again(
    processes: Processes, redis: Redis, run: str
) -> None:
    """The bank has seen epoch 2; Redis counts from below it; the trainer is still taken."""
    settings(processes, *FAKE)
    with ended(processes):
        processes.bank.start()
        for step in (1, 2):
            processes.start_trainer()
            await train(processes, step)
            await processes.fates(step)
            assert processes.end_trainer(signal.SIGTERM) == 0
        await redis.delete(RunStreams(redis, run).key("epoch", "trainer"))
        processes.start_trainer()
        await train(processes, 3)
        await processes.fates(3)
        status = await processes.status()
        assert processes.end_trainer(signal.SIGTERM) == 0
    assert status.trainer_epoch == 3
