"""Token payloads of turns as they are kept and leased: one TurnPayload each, zstd-compressed.

Owns: the checks and the way back. Promise: a payload that is gone, too large or unreadable is a
Refused that names it; no more than BYTES_MAX is ever unpacked from one. Does not cover: where
payloads are kept (streams.py), who writes them (the router).
"""

from __future__ import annotations

import zstandard
from google.protobuf.message import DecodeError

from muster.errors import Refused
from muster.rpc import MESSAGE_BYTES_MAX
from muster.v1 import events_pb2 as ev

BYTES_MAX = MESSAGE_BYTES_MAX  # unpacked


def size(key: str, data: bytes) -> int:
    """Bytes of a payload when unpacked, without unpacking it; 0 where it does not tell.

    Raises Refused for what is not compressed at all, or tells more than BYTES_MAX.
    """
    try:
        told = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise unreadable(key, error) from error
    if told > BYTES_MAX:
        raise refusal("the tokens of a turn are too large to send", key)
    return max(0, told)


def unpacked(key: str, data: bytes) -> ev.TurnPayload:
    """The turn's segments. Raises Refused, naming `key`."""
    size(key, data)
    try:
        # A frame that tells its size was checked by it; the limit counts only for others.
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=BYTES_MAX)
        return ev.TurnPayload.FromString(plain)
    except (zstandard.ZstdError, DecodeError) as error:
        raise unreadable(key, error) from error


def unreadable(key: str, error: Exception) -> Refused:
    return refusal(f"the tokens of a turn cannot be read ({error})", key)


def refusal(problem: str, key: str) -> Refused:
    way_out = "restore the Redis data of this run, or start a new run"
    return Refused(problem, field="payload_key", value=key, way_out=way_out)
