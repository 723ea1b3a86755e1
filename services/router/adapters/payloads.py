"""The tokens of a turn as they are recorded: protobuf, compressed.

Owns: `Payloads`. Promise: what is made of equal segments reads equal, whoever made it; the opening
that siblings share is encoded once (32,000 tokens take 2 ms in which nothing else runs), and a
large payload is compressed beside the event loop; what is kept for that is bounded. Does not cover:
when a turn is recorded, and under which key (durable.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zstandard

from muster import segment_codec
from muster.types import Segment, SegmentKind
from muster.v1 import events_pb2 as ev

_LEVEL = 1
_LARGE = 32_768  # bytes; about 0.2 ms of compression, and a thread costs half of that


class Payloads:
    """Of one router."""

    kept_tokens_max = 1 << 20  # of all openings whose encoding is kept; 4 bytes each

    def __init__(self) -> None:
        self._packer = zstandard.ZstdCompressor(level=_LEVEL)
        # By identity: siblings have one object (tokens.py), and comparing would cost as much.
        self._openings: dict[int, tuple[tuple[int, ...], bytes]] = {}
        self._kept = 0  # tokens

    def text(self, text: str) -> bytes:
        """What a command printed."""
        return self._packer.compress(text.encode())

    async def turn(self, segments: Sequence[Segment]) -> bytes:
        """A TurnPayload: messages put one behind another are one message with all their fields."""
        data = b"".join(self._encoded(segment) for segment in segments)
        if len(data) < _LARGE:
            return self._packer.compress(data)
        return await asyncio.to_thread(_compressed, data)

    def _encoded(self, segment: Segment) -> bytes:
        ids = segment.token_ids
        if segment.kind is not SegmentKind.PROMPT or 4 * len(ids) < _LARGE or segment.experts:
            return _alone(segment)  # routing is of each sibling's own prefill
        known = self._openings.get(id(ids))
        if known is not None:
            return known[1]
        data = _alone(segment)
        self._openings[id(ids)] = ids, data  # kept alive with it, so nothing else gets its id
        self._kept += len(ids)
        while self._kept > self.kept_tokens_max:
            gone, _ = self._openings.pop(next(iter(self._openings)))
            self._kept -= len(gone)
        return data


def _alone(segment: Segment) -> bytes:
    return ev.TurnPayload(segments=[segment_codec.segment_to_pb(segment)]).SerializeToString()


def _compressed(data: bytes) -> bytes:
    """In any thread: a compressor is of one thread at a time."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)
