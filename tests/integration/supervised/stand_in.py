"""A service that does nothing but what the supervisor sees: announce itself, be healthy, end.

    stand_in.py NAME MODE CONFIG

MODE: serve; orphans (also starts a process in a session of its own, without our environment);
orphans-of-ours (with it); stubborn (ignores SIGTERM);
refuse (a person's line, status 2); once (crashes, but only the first time);
lead (leads its role, or stands by).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from muster import rpc
from muster.errors import Fenced
from muster.leader import Leadership
from muster.registry import Registry


async def _lead(name: str, settings: dict[str, Any]) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    redis = Redis.from_url(settings["redis"]["url"])
    registry = Registry(redis, settings["run"])
    leadership = Leadership(redis, settings["run"], name)
    async with registry.announce("standby", f"{name}-{os.getpid()}", ""):
        if not await leadership.stand_by(stopping):
            return
    async with (
        leadership.lead() as epoch,
        rpc.serve("127.0.0.1:0", [], names=[f"stand.in.{name}"], grace_s=0) as server,
        registry.announce(name, f"{name}-{epoch}", server.address),
    ):
        await stopping.wait()
    await redis.aclose()


async def _serve(name: str, mode: str, settings: dict[str, Any]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if mode == "stubborn" else stopping.set)
    redis = Redis.from_url(settings["redis"]["url"])
    registry = Registry(redis, settings["run"])
    async with (
        rpc.serve("127.0.0.1:0", [], names=[f"stand.in.{name}"], grace_s=0) as server,
        registry.announce(name, name, server.address),
    ):
        await stopping.wait()
    await redis.aclose()


def main() -> int:
    name, mode, config = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if mode == "refuse":
        sys.stderr.write(f"{name}: {name}.listen = '127.0.0.1:1': taken → choose another\n")
        return 2
    marker = config.parent / f"{name}.crashed"
    if mode == "once" and not marker.exists():
        marker.touch()
        raise RuntimeError("planted")
    if mode == "orphans-of-ours":
        subprocess.Popen(["/usr/bin/sleep", "1000"], start_new_session=True)
    if mode == "orphans":
        # No environment: only its descent shows whose it is.
        subprocess.Popen(["/usr/bin/sleep", "1000"], start_new_session=True, env={})
    settings = tomllib.loads(config.read_text())
    if mode == "lead":
        status = 0
        try:
            asyncio.run(_lead(name, settings))
        except* Fenced as group:
            sys.stderr.write(f"{name}: {group.exceptions[0]}\n")
            status = 2
        return status
    asyncio.run(_serve(name, mode, settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
