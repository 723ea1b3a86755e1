"""How gRPC wakes the event loop: left alone, a busy one takes one answer each time it comes around.

grpc.aio's polling thread writes one byte to a socket for each completed operation, and the loop
reads one byte each time it comes around, though it then handles all that is complete. Some 280
unread bytes fill the socket, and the thread waits in `write` while answers lie there
(grpc/_cython/_cygrpc/aio/completion_queue.pyx.pxi). With 1,000 calls under way and 2 ms of other
work per turn of the loop the thread stood so half of the time.

Owns: `drain_wakeups`. Promise: all unread bytes but one are taken whenever there are any; one is
always left, so gRPC's own reader never waits and no wake-up is lost. Does not cover: gRPC that was
used in this process before (then nothing is changed).
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from typing import Any

import grpc

_MOST = 65_536  # bytes of one read


def drain_wakeups(loop: asyncio.AbstractEventLoop) -> bool:
    """Call in the loop before the first channel or server; False when it was too late."""
    made: list[socket.socket] = []
    original: Any = socket.socketpair

    def remembered(*args: Any, **options: Any) -> Any:
        pair = original(*args, **options)
        made.append(pair[0])
        return pair

    socket.socketpair = remembered
    try:
        grpc.aio.init_grpc_aio()
    finally:
        socket.socketpair = original
    if len(made) != 1:
        return False
    mine = made[0].dup()  # its file is the same, its number is not: a loop has one reader for each
    loop.add_reader(mine, _drain, mine)
    return True


def _drain(reader: socket.socket) -> None:
    """Take what is there but one byte. Only this loop reads, so none goes in between."""
    there = struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, bytes(4)))[0]
    if there > 1:
        reader.recv(min(there - 1, _MOST), socket.MSG_DONTWAIT)
