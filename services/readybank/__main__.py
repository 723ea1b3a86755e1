"""`python -m services.readybank --config FILE`: one ready bank, until SIGTERM."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.lifecycle import Lifecycle


def main() -> int:
    parser = argparse.ArgumentParser(prog="muster-readybank", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; default: built-in settings")
    arguments = parser.parse_args()

    from muster import lifecycle

    return lifecycle.run(serve, name="readybank", config_path=arguments.config)


async def serve(life: Lifecycle) -> None:
    """Take the bank over, read what is there, then answer calls."""
    import asyncio

    from muster import rpc
    from muster.journal import Journal
    from muster.registry import Registry
    from muster.streams import RunStreams, connect, next_epoch
    from muster.tasks import end
    from muster.v1.readybank_pb2_grpc import add_ReadyBankServiceServicer_to_server
    from services.readybank.config import ReadyBankConfig, rules
    from services.readybank.driver import BankDriver
    from services.readybank.machine import BankMachine
    from services.readybank.server import NAME, ReadyBankServer

    config = life.config.section("readybank", ReadyBankConfig)
    async with connect(life.config.redis) as redis:
        epoch = await next_epoch(redis, life.config.run, "readybank")
        streams = RunStreams(redis, life.config.run, role="readybank", epoch=epoch)
        path = life.config.state_dir / "journal" / f"readybank-{epoch:04d}.jsonl"
        machine = BankMachine(rules(life.config, config))
        journal = Journal(path, "readybank", machine.rules)
        driver = BankDriver(streams, config, machine, journal)
        servicer = (add_ReadyBankServiceServicer_to_server, ReadyBankServer(driver))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(driver.run(life.stopping), name="machine")
                trainer = await redis.get(streams.key("epoch", "trainer"))
                await driver.recover(int(trainer or 0))
                reading = tasks.create_task(driver.tail(), name="tail")
                ticking = tasks.create_task(driver.ticks(), name="ticks")
                registry = Registry(redis, life.config.run)
                async with (
                    rpc.serve(
                        config.listen, [servicer], names=[NAME], field="readybank.listen"
                    ) as server,
                    registry.announce("readybank", f"bank-{epoch}", server.address),
                ):
                    await life.stopping.wait()
                    await end(reading, ticking)
        finally:
            journal.close()


if __name__ == "__main__":
    raise SystemExit(main())
