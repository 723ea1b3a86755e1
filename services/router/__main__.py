"""`python -m services.router --config FILE`: parse, wire, run.

A second process of the same run stands by until the first is gone or silent (muster/leader.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from muster.lifecycle import Lifecycle, run

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from muster.registry import Registry
    from muster.rpc import Listener


def main() -> int:
    parser = argparse.ArgumentParser(prog="services.router", description="Muster's front door.")
    parser.add_argument("--config", type=Path, help="muster.toml (default: built-in values)")
    return run(_main, name="router", config_path=parser.parse_args().config)


async def _main(life: Lifecycle) -> None:
    from muster import rpc, streams
    from muster.leader import Leadership
    from muster.model import ensure_model
    from muster.registry import Registry
    from muster.wakeups import drain_wakeups
    from services.router.config import RouterConfig

    drain_wakeups(asyncio.get_running_loop())
    config = life.config
    section = config.section("router", RouterConfig)
    model = ensure_model(config.model.path, config.state_dir / "cache")
    async with streams.connect(config.redis) as client:
        registry = Registry(client, config.run)
        keeps_all = config.redis.appendfsync == "always"
        leadership = Leadership(client, config.run, "router", keeps_all=keeps_all)
        async with registry.announce("standby", f"router-{os.getpid()}", ""):
            if not await leadership.stand_by(life.stopping):
                return
        # Bound before the former owner is fenced: a wrong address must not end a run that works.
        listener = rpc.listener(section.listen, field="router.listen", fallback=leadership.stood_by)
        async with leadership.lead() as epoch:
            await _lead(life, client, registry, listener, epoch, model)


async def _lead(
    life: Lifecycle, client: Redis, registry: Registry, listener: Listener, epoch: int, model: Path
) -> None:
    """What the router in charge does, until it is asked to stop or is fenced."""
    from muster import collector, streams
    from muster.advertise import advertised
    from muster.journal import Journal
    from muster.memory import memory_problem
    from muster.tasks import end
    from muster.v1 import router_pb2_grpc
    from services.router.adapters.calls import Calls
    from services.router.adapters.durable import Durable
    from services.router.adapters.tokenizer import HfChatCodec
    from services.router.config import RouterConfig, rules
    from services.router.driver import RouterDriver
    from services.router.machine import RouterMachine
    from services.router.server import RouterServicer

    config = life.config
    section = config.section("router", RouterConfig)
    machine_rules = rules(config, section, epoch)
    machine = RouterMachine(machine_rules)
    journal = Journal(
        config.state_dir / "journal" / f"router-{epoch:04d}.jsonl", "router", machine_rules
    )
    durable = Durable(client, streams.RunStreams(client, config.run, role="router", epoch=epoch))
    calls = Calls(
        HfChatCodec(model),
        durable.task_archive,
        box_start_timeout_s=section.box_start_timeout_s,
        verify_queue_s=section.verify_queue_s,
        host_away_s=section.host_away_s,
        block_tokens=machine_rules.prefix_block_tokens,
    )
    driver = RouterDriver(
        machine,
        calls,
        durable,
        registry,
        journal,
        section,
        memory=lambda: memory_problem(client, config.redis),
        logs=str(config.state_dir / "logs"),
    )
    servicer = RouterServicer(driver, config.run, life.stopping, section)
    service = (router_pb2_grpc.add_RouterServiceServicer_to_server, servicer)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(driver.run(life.stopping), name="router")
        try:
            await driver.recover()
            collector.settle()
            async with (
                listener.serving([service], names=["muster.v1.RouterService"]) as server,
                registry.announce("router", f"router-{epoch}", advertised(server.address, config)),
            ):
                await asyncio.wait([running])
        finally:  # a fenced router's calls are cut off, not waited for
            await end(running)
    await calls.close()
    journal.close()


if __name__ == "__main__":
    sys.exit(main())
