"""`python -m services.router --config FILE`: parse, wire, run."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from muster.lifecycle import Lifecycle, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="services.router", description="Muster's front door.")
    parser.add_argument("--config", type=Path, help="muster.toml (default: built-in values)")
    return run(_main, name="router", config_path=parser.parse_args().config)


async def _main(life: Lifecycle) -> None:
    from muster import rpc, streams
    from muster.journal import Journal
    from muster.model import ensure_model
    from muster.registry import Registry
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
    listener = rpc.Listener(section.listen, field="router.listen")
    model = ensure_model(config.model.path, config.state_dir / "cache")
    async with streams.connect(config.redis) as client:
        epoch = await streams.next_epoch(client, config.run, "router")
        machine_rules = rules(config, section, epoch)
        machine = RouterMachine(machine_rules)
        journal = Journal(
            config.state_dir / "journal" / f"router-{epoch:04d}.jsonl", "router", machine_rules
        )
        run_streams = streams.RunStreams(client, config.run, role="router", epoch=epoch)
        durable = Durable(client, run_streams)
        calls = Calls(
            HfChatCodec(model),
            durable.task_archive,
            box_start_timeout_s=section.box_start_timeout_s,
        )
        registry = Registry(client, config.run)
        driver = RouterDriver(machine, calls, durable, registry, journal, section)
        servicer = RouterServicer(driver, config.run, life.stopping, section.groups_max)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(driver.run(life.stopping), name="router")
            await driver.recover()
            service = (router_pb2_grpc.add_RouterServiceServicer_to_server, servicer)
            async with (
                listener.serving([service], names=["muster.v1.RouterService"]) as server,
                registry.announce("router", f"router-{epoch}", server.address),
            ):
                await asyncio.wait([running])
        await calls.close()
        journal.close()


if __name__ == "__main__":
    sys.exit(main())
