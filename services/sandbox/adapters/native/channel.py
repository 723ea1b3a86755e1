"""One socket to a peer that answers one request at a time: frames in asyncio.

Promise: what comes from the peer is checked for size and form before use; a peer that ends or
speaks nonsense is BoxFailure, never a hang: every wait has a limit, and the limit of a request
does not count the time that it waits for its turn. Does not cover: what the frames mean.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from services.sandbox.adapters.native import wire
from services.sandbox.box import BoxFailure


class Late(BoxFailure):
    """Sent, and not answered in time: the channel is out of step and closed."""


class Channel:
    """One request at a time over one socket."""

    def __init__(self, own: socket.socket):
        own.setblocking(False)
        self._own = own
        self._turn = asyncio.Lock()
        self._read = bytearray()
        self._owed = 0  # answers to callers that left before theirs came
        self._users = 0  # calls that may be waiting on the socket now
        self._closed = False

    async def call(
        self, request: dict[str, Any], blob: bytes = b"", *, wait_s: float, fd: int = -1
    ) -> tuple[dict[str, Any], bytes]:
        """Send and wait for the answer; raises BoxFailure when there is none in `wait_s`.

        A caller may be cancelled: its answer is then read and dropped by the next one.
        """
        try:
            frame = wire.encode(request, blob)
        except wire.ProtocolError as error:
            raise BoxFailure(f"{request.get('op')!r} failed: {error}; nothing was sent") from error
        await self._take_turn(wait_s)
        try:
            async with self._in_use(), asyncio.timeout(wait_s):
                await self._send(frame, fd)
                self._owed += 1
                while True:
                    answer = await self._receive()
                    self._owed -= 1
                    if self._owed == 0:
                        return answer
        except TimeoutError:
            gone = self._hung_up()  # it did not think too long: we did, and slept
            self.close()
            if gone:
                raise BoxFailure(f"{request.get('op')!r} failed: peer gone") from None
            raise Late(f"no answer to {request.get('op')!r} in {wait_s:g} s") from None
        except (OSError, EOFError, wire.ProtocolError) as error:
            self.close()
            raise BoxFailure(f"{request.get('op')!r} failed: {error or 'peer gone'}") from error
        finally:
            self._turn.release()

    async def _take_turn(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._turn.acquire()
        except TimeoutError:
            raise BoxFailure(f"not its turn in {wait_s:g} s; nothing was sent") from None

    async def receive(self, wait_s: float) -> dict[str, Any]:
        """The first frame, which comes unasked."""
        try:
            async with self._in_use(), asyncio.timeout(wait_s):
                return (await self._receive())[0]
        except TimeoutError:
            raise BoxFailure(f"not ready after {wait_s:g} s") from None
        except (OSError, EOFError, wire.ProtocolError) as error:
            raise BoxFailure(f"did not start: {error or 'ended at once'}") from error

    def mention(self, request: dict[str, Any]) -> bool:
        """Send what is not answered, unless a call is on its way; False when the peer has gone."""
        if self._closed:
            return False
        if self._turn.locked():
            return True
        frame = wire.encode(request)
        try:
            if self._own.send(frame) < len(frame):
                self.close()  # cut in the middle
        except BlockingIOError:
            return True  # it reads nothing now
        except OSError:
            return False
        return not self._closed

    def _hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self._own, 0)
        return bool(poll.poll(0))

    async def _send(self, frame: bytes, fd: int) -> None:
        if self._closed:
            raise EOFError("closed")
        whole = False
        try:
            if fd >= 0:
                sent = socket.send_fds(self._own, [frame], [fd])
                frame = frame[sent:]
            await asyncio.get_running_loop().sock_sendall(self._own, frame)
            whole = True
        finally:
            if not whole:  # cut in the middle of a frame: the peer could not read the next one
                self.close()

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

    @asynccontextmanager
    async def _in_use(self) -> AsyncIterator[None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._closed and not self._users:
                self._own.close()

    def close(self) -> None:
        """The peer sees the end of its socket and ends, and so does a call in flight."""
        if self._closed:
            return
        self._closed = True
        if not self._users:
            self._own.close()
            return
        # A socket that is closed under a waiting reader would never wake it.
        with suppress(OSError):  # the peer has gone already
            self._own.shutdown(socket.SHUT_RDWR)
