"""The tokens of a conversation as they are sent: packed, append-only.

Owns: `Context`. Promise: pure; `packed` is what codec.pack_ids makes of all ids, bit for bit, and
costs one copy of memory however it grew; the head (an opening) may be one object for all siblings
of a group; no Python object per token is kept, so nothing here is walked by the collector. Does not
cover: what the tokens mean (conversation.py).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_WIDTH = 4  # bytes of an int32
Parts = tuple[bytes | bytearray, ...]
"""Packed ids in pieces that are put one behind another; to be used before anything is appended."""


class Context:
    """Ids of one context, shape [n], little-endian int32."""

    def __init__(self, head: bytes = b""):
        """head: packed ids that it begins with."""
        self._head, self._tail = head, bytearray()

    def __len__(self) -> int:
        return (len(self._head) + len(self._tail)) // _WIDTH

    @property
    def last(self) -> int | None:
        """The newest id; None when there is none."""
        end = bytes(self._tail[-_WIDTH:]) or self._head[-_WIDTH:]
        return int.from_bytes(end, "little", signed=True) if end else None

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids; each must be an int32."""
        self._tail += pack(ids)

    def cut(self, tokens: int) -> None:
        """Take the newest so many ids back; never any of the head."""
        size = tokens * _WIDTH
        if size > len(self._tail):
            raise ValueError("more than was appended")
        if size:
            del self._tail[-size:]

    def packed(self) -> bytes:
        """All of it."""
        return b"".join(self.parts())

    def parts(self) -> Parts:
        """All of it, not copied."""
        return self._head, self._tail

    def block(self, start: int, end: int) -> bytes:
        """The packed ids from `start` to before `end`."""
        head = len(self._head)
        low, high = start * _WIDTH, end * _WIDTH
        return self._head[low:high] + bytes(self._tail[max(0, low - head) : max(0, high - head)])

    def ids(self) -> list[int]:
        """All ids."""
        return list(struct.unpack(f"<{len(self)}i", self.packed()))


def pack(ids: Sequence[int]) -> bytes:
    """As codec.pack_ids, without its error."""
    return struct.pack(f"<{len(ids)}i", *ids)
