"""The service's side of the keeper and of PID 1 of each box: frames over sockets, in asyncio.

Promise: what comes from a box is checked for type and bounds before use; a peer that ends or
speaks nonsense is BoxFailure, never a hang: every wait has a limit.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import services
from muster.errors import HostUnfit
from services.sandbox.adapters.native import wire
from services.sandbox.box import BoxFailure

_START = "from services.sandbox.adapters.native.keeper import main; import sys; "
_KEEPER_WAIT_S = 30.0


class Channel:
    """One request at a time over one socket."""

    def __init__(self, own: socket.socket):
        own.setblocking(False)
        self._own = own
        self._turn = asyncio.Lock()
        self._read = bytearray()
        self._owed = 0  # answers to callers that left before theirs came

    async def call(
        self, request: dict[str, Any], blob: bytes = b"", *, wait_s: float, fd: int = -1
    ) -> tuple[dict[str, Any], bytes]:
        """Send and wait for the answer; raises BoxFailure when there is none in `wait_s`.

        A caller may be cancelled: its answer is then read and dropped by the next one.
        """
        try:
            async with asyncio.timeout(wait_s), self._turn:
                await self._send(wire.encode(request, blob), fd)
                self._owed += 1
                while True:
                    answer = await self._receive()
                    self._owed -= 1
                    if self._owed == 0:
                        return answer
        except TimeoutError:
            self.close()
            raise BoxFailure(f"no answer to {request.get('op')!r} in {wait_s:g} s") from None
        except (OSError, EOFError, wire.ProtocolError) as error:
            self.close()
            raise BoxFailure(f"{request.get('op')!r} failed: {error or 'peer gone'}") from error

    async def receive(self, wait_s: float) -> dict[str, Any]:
        """The first frame, which comes unasked."""
        try:
            async with asyncio.timeout(wait_s):
                return (await self._receive())[0]
        except TimeoutError:
            raise BoxFailure(f"not ready after {wait_s:g} s") from None
        except (OSError, EOFError, wire.ProtocolError) as error:
            raise BoxFailure(f"did not start: {error or 'ended at once'}") from error

    async def _send(self, frame: bytes, fd: int) -> None:
        if self._own.fileno() < 0:
            raise EOFError("closed")
        if fd >= 0:
            sent = socket.send_fds(self._own, [frame], [fd])
            frame = frame[sent:]
        await asyncio.get_running_loop().sock_sendall(self._own, frame)

    async def _receive(self) -> tuple[dict[str, Any], bytes]:
        header, blob = wire.sizes(await self._buffered(wire.PREFIX.size))
        whole = await self._buffered(wire.PREFIX.size + header + blob)
        del self._read[: len(whole)]
        text = whole[wire.PREFIX.size : wire.PREFIX.size + header]
        return wire.decode(text), whole[wire.PREFIX.size + header :]

    async def _buffered(self, count: int) -> bytes:
        """The first `count` bytes, left in the buffer: a cancelled reader loses nothing."""
        loop = asyncio.get_running_loop()
        while len(self._read) < count:
            part = await loop.sock_recv(self._own, 1 << 18)
            if not part:
                raise EOFError("the peer has ended")
            self._read += part
        return bytes(self._read[:count])

    def close(self) -> None:
        """The peer sees the end of its socket and ends."""
        self._own.close()


class KeeperProcess:
    """The keeper as a child process of the service."""

    def __init__(self, runtime_dir: Path, instance: str):
        own, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        root = Path(services.__file__).resolve().parent.parent
        call = f"main({str(runtime_dir)!r}, {instance!r}, {theirs.fileno()})"
        code = f"import sys; sys.path.insert(0, {str(root)!r}); {_START}{call}"
        # -I -S: no site-packages, nothing from the environment; it starts in about 30 ms.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            cwd="/",
            env={},
        )
        theirs.close()
        self._channel = Channel(own)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> int:
        """Wait until it can make boxes; how many leftover groups it swept. Raises HostUnfit."""
        try:
            first = await self._channel.receive(_KEEPER_WAIT_S)
        except BoxFailure as error:
            await self.stop()
            raise HostUnfit(
                f"the keeper of the boxes did not start: {error}", way_out="see its lines above"
            ) from error
        if "error" in first:
            await self.stop()
            raise HostUnfit(
                f"this host cannot isolate boxes: {first['error']}", way_out=str(first["way_out"])
            )
        return int(first["swept"])

    async def call(self, request: dict[str, Any], fd: int = -1) -> tuple[dict[str, Any], bytes]:
        """One request; raises BoxFailure with the keeper's words."""
        answer, blob = await self._channel.call(request, wait_s=_KEEPER_WAIT_S, fd=fd)
        if "error" in answer:
            raise BoxFailure(str(answer["error"])[:2000])
        return answer, blob

    async def stop(self) -> None:
        """Let it end every box and itself; SIGKILL when it does not in time."""
        self._channel.close()
        try:
            await asyncio.to_thread(self._process.wait, _KEEPER_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
