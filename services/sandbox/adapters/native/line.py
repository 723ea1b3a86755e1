"""One end of a socket that never makes its owner wait: frames go in and out as they can.

Promise: a peer that stops in the middle of a frame, or reads nothing, costs memory for one frame
in each direction and no time. Standard library only; runs in PID 1 of a box.
"""

from __future__ import annotations

import select
import socket
from typing import Any

from services.sandbox.adapters.native import wire

_CHUNK = 1 << 18


class Line:
    """Frames of wire.py over a socket, which it owns."""

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self._end = end
        self._in, self._out = bytearray(), bytearray()

    @property
    def handle(self) -> int:
        return self._end.fileno()

    @property
    def events(self) -> int:
        """What to poll for; the peer's end is told by poll in any case."""
        return (0 if self._whole() else select.POLLIN) | (select.POLLOUT if self._out else 0)

    def hear(self) -> bool:
        """Take what has come, up to one frame; False when the peer has gone."""
        try:
            while not self._whole():
                part = self._end.recv(_CHUNK)
                if not part:
                    return False
                self._in += part
        except BlockingIOError:
            return True
        except (OSError, wire.ProtocolError):
            return False
        return True

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """The frame that has come, if it is whole. Raises ProtocolError."""
        size = self._whole()
        if not size:
            return None
        frame = bytes(self._in[:size])
        del self._in[:size]
        header = wire.PREFIX.size + wire.sizes(frame[: wire.PREFIX.size])[0]
        return wire.decode(frame[wire.PREFIX.size : header]), frame[header:]

    def tell(self, header: dict[str, Any], blob: bytes = b"") -> bool:
        """Send a frame, now or when the peer reads; False when the peer has gone."""
        self._out += wire.encode(header, blob)
        return self.flush()

    def flush(self) -> bool:
        """Send what can be sent; False when the peer has gone."""
        try:
            while self._out:
                del self._out[: self._end.send(self._out)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._end.close()

    def _whole(self) -> int:
        """Bytes of the first frame when all of it is there, else 0."""
        if len(self._in) < wire.PREFIX.size:
            return 0
        size = wire.PREFIX.size + sum(wire.sizes(bytes(self._in[: wire.PREFIX.size])))
        return size if len(self._in) >= size else 0
