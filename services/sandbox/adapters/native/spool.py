"""Keeps the first and the last bytes of an output of any length. Pure."""

from __future__ import annotations


class Spool:
    """Half of `limit` bytes from the head, half from the tail; counts all. O(limit) memory."""

    def __init__(self, limit: int):
        self._head_max = limit // 2
        self._tail_max = limit - self._head_max
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """The next bytes of the output."""
        self.total += len(data)
        room = self._head_max - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if len(data) >= self._tail_max:
            self._tail[:] = data[len(data) - self._tail_max :]
        elif data:
            self._tail += data
            excess = len(self._tail) - self._tail_max
            if excess > 0:
                del self._tail[:excess]

    @property
    def head(self) -> bytes:
        return bytes(self._head)

    @property
    def tail(self) -> bytes:
        return bytes(self._tail)
