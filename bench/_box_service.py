"""A sandbox service of its own process, as in production, with the Redis that it announces in.

Owns: both processes and their end. Promise: the service is asked to stop first, so that it leaves
nothing; neither outlives the block. Does not cover: what is asked of it (_box_arm.py).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from bench import _bank_world as world
from muster import rpc
from muster.registry import Registry

_STOP_S = 30.0


@asynccontextmanager
async def service(
    folder: Path, boxes_max: int, bases: Mapping[str, str]
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to it. `bases`: as sandbox.bases; all else is as without a configuration."""
    async with world.server(folder, "everysec") as (redis, url):
        path = folder / "bench.toml"
        known = "".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in bases.items())
        path.write_text(
            f'run = "{world.RUN}"\nstate_dir = "{folder}/state"\n[redis]\nurl = "{url}"\n'
            f"[sandbox]\nboxes_max = {boxes_max}\nwarm_max = 0\n[sandbox.bases]\n{known}"
            '[telemetry]\nlog_level = "WARNING"\ntraces = false\n'
        )
        process = world.start([sys.executable, "-m", "services.sandbox", "--config", str(path)])
        with world.ended(process):
            async with asyncio.timeout(world.DEADLINE_S):
                while not (found := await Registry(redis, world.RUN).list("sandbox")):
                    if process.poll() is not None:
                        raise SystemExit("the sandbox service did not start")
                    await asyncio.sleep(0.05)
            async with rpc.channel(found[-1].address) as channel:
                yield channel
            process.terminate()
            await asyncio.to_thread(process.wait, _STOP_S)
