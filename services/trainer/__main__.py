"""`python -m services.trainer --config FILE`: parse, wire, run."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from muster import lifecycle

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from muster.config import Config
    from services.trainer.config import TrainerConfig
    from services.trainer.driver import Driver
    from services.trainer.policy import Policy


def main() -> int:
    """Exit status: 0 asked to stop, 2 an error for people."""
    parser = argparse.ArgumentParser(prog="services.trainer", description="The GRPO trainer.")
    parser.add_argument("--config", type=Path, help="TOML file; without it, defaults")
    # A pass over one micro-batch is not interrupted, so the drain may take some seconds.
    path = parser.parse_args().config
    return lifecycle.run(_serve, name="trainer", config_path=path, grace_s=8.0)


async def _serve(life: lifecycle.Lifecycle) -> None:
    from muster.model import ensure_model
    from muster.registry import Registry
    from muster.rpc import serve
    from muster.streams import connect, next_epoch
    from muster.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
    from services.trainer.config import TrainerConfig
    from services.trainer.server import SERVICE, TrainerServicer

    config = life.config
    mine = config.section("trainer", TrainerConfig)
    base = await asyncio.to_thread(ensure_model, config.model.path, config.state_dir / "cache")
    async with connect(config.redis) as redis:
        epoch = await next_epoch(redis, config.run, "trainer")
        registry = Registry(redis, config.run)
        driver = _driver(config, redis, epoch, base)
        door = [(add_TrainerServiceServicer_to_server, TrainerServicer(driver))]
        async with (
            serve(mine.listen, door, names=[SERVICE], field="trainer.listen") as server,
            registry.announce("trainer", f"trainer-{epoch}", server.address),
        ):
            await driver.run(life.stopping)


def _driver(config: Config, redis: Redis, epoch: int, base: Path) -> Driver:
    from muster.registry import Registry
    from muster.transfer.publisher import TransferSettings
    from services.trainer.adapters.bank import GrpcBank
    from services.trainer.adapters.checkpoint import CheckpointStore
    from services.trainer.adapters.fleet import InferenceFleet
    from services.trainer.adapters.version_log import RedisVersionLog
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
    )
    bank = GrpcBank(
        registry,
        run=config.run,
        epoch=epoch,
        groups=config.groups_per_batch,
        lease_wait_s=mine.lease_wait_s,
        call_deadline_s=mine.call_deadline_s,
    )
    transfer = TransferSettings(
        backend=mine.transport,
        host=mine.transport_host,
        timeout_s=mine.publish_deadline_s,
        call_timeout_s=mine.call_deadline_s,
    )
    checkpoints = config.state_dir / "checkpoints" / config.run
    return Driver(
        settings,
        load=_loader(mine),
        store=CheckpointStore(checkpoints, config.run, mine.checkpoints_keep),
        bank=bank,
        versions=RedisVersionLog(redis, config.run, epoch),
        fleet=InferenceFleet(registry, run=config.run, epoch=epoch, transfer=transfer),
    )


def _loader(config: TrainerConfig) -> Callable[[Path], Policy]:
    def load(folder: Path) -> Policy:
        from services.trainer.adapters.torch_policy import TorchPolicy, settings_of

        return TorchPolicy.load(folder, settings_of(config))

    return load


if __name__ == "__main__":
    sys.exit(main())
