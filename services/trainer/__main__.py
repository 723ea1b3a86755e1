"""`python -m services.trainer --config FILE`: parse, wire, run."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from muster import lifecycle
from services.trainer.adapters import worker

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from muster.config import Config
    from muster.registry import Registry
    from services.trainer.adapters.checkpoint import CheckpointStore
    from services.trainer.config import TrainerConfig
    from services.trainer.driver import Driver
    from services.trainer.policy import Policy
    from services.trainer.ports import Fleet


def main() -> int:
    """Exit status: 0 asked to stop, 2 an error for people.

    A stop waits for no work: a pass over one micro-batch, or the loading of a model, is not
    interrupted, and nothing of it is needed any more.
    """
    parser = argparse.ArgumentParser(prog="services.trainer", description="The GRPO trainer.")
    parser.add_argument("--config", type=Path, help="TOML file; without it, defaults")
    path = parser.parse_args().config
    status = lifecycle.run(_serve, name="trainer", config_path=path)
    if worker.at_work():  # torch in a thread does not survive the end of the interpreter
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


async def _serve(life: lifecycle.Lifecycle) -> None:
    from muster.advertise import advertised
    from muster.registry import Registry
    from muster.rpc import Listener
    from muster.streams import connect
    from muster.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
    from services.trainer.config import TrainerConfig, check
    from services.trainer.server import SERVICE, TrainerServicer

    config = life.config
    mine = config.section("trainer", TrainerConfig)
    check(mine, config.sections)
    loading = worker.in_daemon(lambda: _base(config, mine), "load")
    base = await worker.unless(life.stopping, loading, "model")
    if base is None:
        return
    store = _store(config, mine, base)
    listener = Listener(mine.listen, field="trainer.listen")
    async with connect(config.redis) as redis:
        taking = _take_over(redis, config.run, mine, store)
        epoch = await worker.unless(life.stopping, taking, "take-over")
        if epoch is None:
            return
        registry = Registry(redis, config.run)
        driver = _driver(config, redis, epoch, base, store)

        @asynccontextmanager
        async def door() -> AsyncIterator[None]:
            servicers = [(add_TrainerServiceServicer_to_server, TrainerServicer(driver))]
            async with (
                listener.serving(servicers, names=[SERVICE]) as server,
                registry.announce(
                    "trainer", f"trainer-{epoch}", advertised(server.address, config)
                ),
            ):
                yield

        driver.door = door
        async with _tracking(config, redis, life.grace_s / 2):
            await driver.run(life.stopping)


@asynccontextmanager
async def _tracking(config: Config, redis: Redis, last_s: float) -> AsyncIterator[None]:
    """The run's figures are tracked within the block, and what was recorded in it to its end."""
    from muster.tasks import end
    from services.trainer.adapters.tracker import Tracker

    wanted = config.tracking
    if not wanted.enabled:
        yield
        return
    tracker = Tracker(
        redis,
        config.run,
        config.tracked(config.run),
        tensorboard=wanted.tensorboard,
        batch_figures=wanted.batch_figures,
    )
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(tracker.run(), name="tracking")
        try:
            yield
        finally:
            await end(following)
            await tracker.last(last_s)


async def _take_over(redis: Redis, run: str, mine: TrainerConfig, store: CheckpointStore) -> int:
    """This trainer's epoch; the folder is this process's own, and every former trainer fenced."""
    from muster.trainer_epoch import take_epoch
    from services.trainer.adapters.retry import retried

    patient = partial(retried, retry_s=mine.retry_s, first_s=mine.retry_first_s)
    await patient("the lock of the checkpoint folder", store.hold)
    used = await worker.in_daemon(store.epoch, "epoch")
    epoch: int = await patient("Redis", lambda: take_epoch(redis, run, used))
    store.note_epoch(epoch)
    return epoch


def _without_tensors(mine: TrainerConfig) -> bool:
    return mine.policy == "fake" and mine.transport == "none"


def _base(config: Config, mine: TrainerConfig) -> Path:
    from muster.model import ensure_model

    if _without_tensors(mine):
        return Path(config.model.path)
    return ensure_model(config.model.path, config.state_dir / "cache")


def _store(config: Config, mine: TrainerConfig, base: Path) -> CheckpointStore:
    from services.trainer.adapters.checkpoint import CheckpointStore
    from services.trainer.adapters.model_files import side_names

    required = () if _without_tensors(mine) else side_names(base)
    root = config.state_dir / "checkpoints" / config.run
    return CheckpointStore(root, config.run, mine.checkpoints_kept, required)


def _driver(config: Config, redis: Redis, epoch: int, base: Path, store: CheckpointStore) -> Driver:
    from muster.bank_calls import GrpcBank
    from muster.registry import Registry
    from services.trainer.adapters.version_log import RedisVersionLog
    from services.trainer.alarms import limits_of
    from services.trainer.config import TrainerConfig
    from services.trainer.driver import Driver, DriverSettings

    mine = config.section("trainer", TrainerConfig)
    registry = Registry(redis, config.run)
    settings = DriverSettings(
        run=config.run,
        epoch=epoch,
        base=base,
        replica_check_s=mine.replica_check_s,
        retry_s=mine.retry_s,
        retry_first_s=mine.retry_first_s,
        checkpoint_every=mine.checkpoint_every,
        checkpoint_idle_s=mine.checkpoint_idle_s,
        ahead_max=mine.ahead_max if mine.loop == "async" else 0,
        start_step=mine.start_step,
        advantage=mine.advantage,
        return_kl=mine.return_kl,
        alarms=limits_of(mine),
    )
    bank = GrpcBank(
        registry,
        run=config.run,
        epoch=epoch,
        groups=config.groups_per_batch,
        lease_wait_s=mine.lease_wait_s,
        call_deadline_s=mine.call_deadline_s,
    )
    return Driver(
        settings,
        load=_loader(mine),
        store=store,
        bank=bank,
        versions=RedisVersionLog(redis, config.run, epoch),
        fleet=_fleet(config, mine, registry, epoch),
    )


def _fleet(config: Config, mine: TrainerConfig, registry: Registry, epoch: int) -> Fleet:
    if mine.transport == "none":
        from services.trainer.adapters.fake import UnsentFleet

        return UnsentFleet(registry)
    from muster.advertise import own_host
    from muster.transfer.active import ActiveRequests
    from muster.transfer.publisher import TransferSettings
    from services.trainer.adapters.fleet import InferenceFleet

    transfer = TransferSettings(
        backend=mine.transport,
        host=mine.transport_host or own_host(config),
        folder=mine.transport_folder,
        active=ActiveRequests(mine.active_requests),
        quorum=mine.publish_quorum,
        bytes_per_s=mine.transport_bytes_per_s,
        timeout_s=mine.publish_deadline_s,
        call_timeout_s=mine.call_deadline_s,
    )
    return InferenceFleet(registry, run=config.run, epoch=epoch, transfer=transfer)


def _loader(config: TrainerConfig) -> Callable[[Path], Policy]:
    if config.policy == "fake":
        from services.trainer.adapters.fake import FakePolicy, FakeTensors

        return FakePolicy.load if config.transport == "none" else FakeTensors.load

    def load(folder: Path) -> Policy:
        from services.trainer.adapters.torch_policy import TorchPolicy, settings_of

        return TorchPolicy.load(folder, settings_of(config))

    return load


if __name__ == "__main__":
    sys.exit(main())
