"""`python -m services.readybank --config FILE`: one ready bank, until SIGTERM.

A second process of the same run stands by, not listening, until the first is gone or silent
(muster/leader.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from muster.lifecycle import Lifecycle
    from muster.registry import Registry
    from muster.rpc import Listener


def main() -> int:
    parser = argparse.ArgumentParser(prog="muster-readybank", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; default: built-in settings")
    arguments = parser.parse_args()

    from muster import lifecycle

    return lifecycle.run(serve, name="readybank", config_path=arguments.config)


async def serve(life: Lifecycle) -> None:
    """Stand by until no other bank leads; then lead."""
    import os

    from muster import rpc
    from muster.leader import Leadership
    from muster.registry import Registry
    from muster.streams import connect
    from services.readybank.config import ReadyBankConfig, check

    run = life.config.run
    config = life.config.section("readybank", ReadyBankConfig)
    check(config)
    async with connect(life.config.redis) as redis:
        registry = Registry(redis, run)
        keeps_all = life.config.redis.appendfsync == "always"
        leadership = Leadership(redis, run, "readybank", keeps_all=keeps_all)
        async with registry.announce("standby", f"readybank-{os.getpid()}", ""):
            if not await leadership.stand_by(life.stopping):
                return
        # Bound before the former owner is fenced: a wrong address must not end a run that works.
        listener = rpc.listener(
            config.listen, field="readybank.listen", fallback=leadership.stood_by
        )
        async with leadership.lead() as epoch:
            await _lead(life, redis, registry, listener, epoch)


async def _lead(
    life: Lifecycle, redis: Redis, registry: Registry, listener: Listener, epoch: int
) -> None:
    """Read what is there, then answer calls, until asked to stop or fenced."""
    import asyncio

    from muster.advertise import advertised
    from muster.bank_calls import GROUPS_PER_BATCH
    from muster.history import History
    from muster.journal import Journal
    from muster.streams import RunStreams
    from muster.tasks import end
    from muster.v1.readybank_pb2_grpc import add_ReadyBankServiceServicer_to_server
    from services.readybank.adapters.clearing import Clearing
    from services.readybank.adapters.scoring import Scorer
    from services.readybank.config import ReadyBankConfig, rules
    from services.readybank.driver import BankDriver
    from services.readybank.machine import BankMachine
    from services.readybank.server import NAME, ReadyBankServer

    config = life.config.section("readybank", ReadyBankConfig)
    streams = RunStreams(redis, life.config.run, role="readybank", epoch=epoch)
    machine = BankMachine(rules(life.config, config))
    history = History(life.config.history(life.config.run), str(epoch))
    clearing = Clearing(
        redis,
        streams,
        lambda entries: asyncio.to_thread(history.append, entries),
        machine.retiring.gone,
        epoch=epoch,
    )
    path = life.config.state_dir / "journal" / f"readybank-{epoch:04d}.jsonl"
    journal = Journal(path, "readybank", machine.rules)
    scorer = Scorer(streams, registry, config.score_wait_s)
    driver = BankDriver(streams, config, machine, journal, clearing, scorer)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(driver.run(life.stopping), name="machine")
            await driver.recover()
            servicer = (add_ReadyBankServiceServicer_to_server, ReadyBankServer(driver, tasks))
            reading = tasks.create_task(driver.tail(), name="tail")
            ticking = tasks.create_task(driver.ticks(), name="ticks")
            async with (
                listener.serving([servicer], names=[NAME]) as server,
                registry.announce(
                    "readybank",
                    f"bank-{epoch}",
                    advertised(server.address, life.config),
                    {GROUPS_PER_BATCH: str(life.config.groups_per_batch)},
                ),
            ):
                await life.stopping.wait()
                await end(reading, ticking)
    finally:
        journal.close()


if __name__ == "__main__":
    raise SystemExit(main())
