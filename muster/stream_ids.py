"""The ids that a Redis server gives the entries of its streams: `MILLISECONDS-SEQUENCE`.

Owns: their order, the next one, their time. Promise: pure. Does not cover: streams (streams.py).
"""

from __future__ import annotations


def id_order(stream_id: str) -> tuple[int, int]:
    """Ids as the server orders them; without a sequence, the first of its millisecond."""
    ms, _, sequence = stream_id.partition("-")
    return int(ms), int(sequence or 0)


def id_after(stream_id: str) -> str:
    """The least id that is greater."""
    ms, sequence = id_order(stream_id)
    return f"{ms}-{sequence + 1}"


def id_unix_s(stream_id: str) -> float:
    """When the server took the entry, Unix seconds on its clock."""
    return id_order(stream_id)[0] / 1000
