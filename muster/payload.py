"""Payloads of turns as they are kept and leased, zstd-compressed: tokens, outputs of commands.

Owns: the checks and the way back. Promise: a payload that is gone, too large or unreadable is a
Refused that names it; no more than the bound is ever unpacked from one, whatever size it tells.
Does not cover: where payloads are kept (streams.py), who writes them (the router).
"""

from __future__ import annotations

import zstandard
from google.protobuf.message import DecodeError

from muster.errors import Refused
from muster.rpc import MESSAGE_BYTES_MAX
from muster.v1 import events_pb2 as ev

BYTES_MAX = MESSAGE_BYTES_MAX  # unpacked


def size(key: str, data: bytes, bytes_max: int = BYTES_MAX) -> int:
    """Bytes of a payload when unpacked, without unpacking it; 0 where it does not tell.

    Raises Refused for what is not compressed at all, or tells more than `bytes_max`.
    """
    try:
        told = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise unreadable(key, error) from error
    if told > bytes_max:
        raise refusal("a payload is too large", key)
    return max(0, told)


def plain(key: str, data: bytes, bytes_max: int = BYTES_MAX) -> bytes:
    """What was packed, at most `bytes_max` of it. Raises Refused, naming `key`."""
    size(key, data, bytes_max)
    try:
        # zstandard heeds its limit only where a frame does not tell its size; `size` did the rest.
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=bytes_max)
    except zstandard.ZstdError as error:
        raise unreadable(key, error) from error


def unpacked(key: str, data: bytes) -> ev.TurnPayload:
    """The turn's segments. Raises Refused, naming `key`."""
    found = plain(key, data)
    try:
        return ev.TurnPayload.FromString(found)
    except DecodeError as error:
        raise unreadable(key, error) from error


def unreadable(key: str, error: Exception) -> Refused:
    return refusal(f"a payload cannot be read ({error})", key)


def refusal(problem: str, key: str) -> Refused:
    way_out = "restore the Redis data of this run, or start a new run"
    return Refused(problem, field="payload_key", value=key, way_out=way_out)
