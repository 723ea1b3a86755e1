"""A former leader that cannot end is ended. (Who leads: tests/integration/test_leader.py.)"""

from __future__ import annotations

import asyncio
import subprocess
import sys

STUCK = """
import asyncio, sys
from redis.asyncio import Redis
from muster.leader import Leadership
from muster.streams import next_epoch

async def main():
    redis = Redis(unix_socket_path=sys.argv[1])
    leadership = Leadership(redis, "r", "router", beat_s=0.01, end_s=0.1)
    await leadership.stand_by(asyncio.Event())
    async with leadership.lead():
        try:  # the heartbeat may see the newer one while that is still being answered
            await next_epoch(redis, "r", "router")
        except asyncio.CancelledError: pass
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass

asyncio.run(main())
"""


async def test_a_former_leader_that_hangs_is_ended(valkey_socket: object) -> None:
    command = [sys.executable, "-c", STUCK, str(valkey_socket)]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("router: epoch of router = '1': a newer router")
