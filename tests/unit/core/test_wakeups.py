"""Answers that are there are taken at once, however busy the loop is."""

from __future__ import annotations

import subprocess
import sys

# A process of its own: gRPC is not to have been used before.
_PROGRAM = """
import asyncio, os, socket, sys
import grpc
from muster import wakeups

async def main():
    loop, pairs, original = asyncio.get_running_loop(), [], socket.socketpair
    socket.socketpair = lambda *a, **k: pairs.append(original(*a, **k)) or pairs[-1]
    assert wakeups.drain_wakeups(loop)
    reader, writer = pairs[-1]
    writer.send(b"1" * 200)
    for _ in range(5):
        await asyncio.sleep(0.001)
    reader.setblocking(False)
    try:
        left = len(reader.recv(1000))
    except BlockingIOError:
        left = 0
    print(left, wakeups.drain_wakeups(loop), flush=True)
    os._exit(0)

asyncio.run(main())
"""


def test_what_is_unread_is_taken_within_a_few_turns_of_the_loop_and_only_once_set_up() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["0", "False"], done.stderr
