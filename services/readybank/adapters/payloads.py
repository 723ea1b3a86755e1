"""Token payloads of leased siblings.

Owns: reading and joining them. Promise: turns in order, bytes as the router wrote them; a payload
that is gone, too large or unreadable is an error that names it, never a shorter trajectory; at most
3 x AHEAD siblings are in memory, whatever the size of the batch. Does not cover: when payloads are
deleted (retire.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zstandard
from google.protobuf.message import DecodeError

from muster import codec
from muster.errors import MusterError, Refused
from muster.rpc import MESSAGE_BYTES_MAX
from muster.streams import RunStreams
from muster.types import EpisodeKey
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from services.readybank.events import LeasedGroup, LeasedSibling

AHEAD = 8
Window = list[tuple[LeasedGroup, LeasedSibling]]
Parts = list[rb.LeaseBatchResponse | MusterError]


async def read(
    streams: RunStreams, groups: Sequence[LeasedGroup], into: asyncio.Queue[Parts]
) -> None:
    """Every sibling with its label, and with its segments when the label is valid; AHEAD at a
    time, and nothing at the end. An error is a part, and the last one."""
    siblings: Window = [(group, sibling) for group in groups for sibling in group.siblings]
    for start in range(0, len(siblings), AHEAD):
        window = siblings[start : start + AHEAD]
        keys = [key for _, sibling in window for key in sibling.payload_keys]
        try:
            found = dict(zip(keys, await streams.payloads(keys), strict=True))
            # Not in a thread: measured, that costs more of the interpreter than it gives.
            parts: Parts = [_part(streams.run, group, sibling, found) for group, sibling in window]
        except MusterError as error:
            await into.put([error])
            return
        await into.put(parts)
    await into.put([])


def _part(
    run: str, group: LeasedGroup, sibling: LeasedSibling, found: dict[str, bytes | None]
) -> rb.LeaseBatchResponse:
    key = EpisodeKey(run, group.group, sibling.sibling, sibling.attempt, 0)
    part = rb.LeaseBatchResponse()
    message = part.trajectory  # filled in place: a copy of all tokens less
    message.group, message.task = group.group, group.task
    message.sibling, message.attempt = sibling.sibling, sibling.attempt
    message.label.CopyFrom(codec.label_to_pb(key, sibling.label))
    message.sampling.CopyFrom(codec.sampling_to_pb(group.sampling))
    for name in sibling.payload_keys:
        message.segments.extend(_unpacked(name, found[name]).segments)
    return part


_unpacker = zstandard.ZstdDecompressor()  # of the event loop's thread


def _unpacked(name: str, data: bytes | None) -> ev.TurnPayload:
    if data is None:
        raise _refusal("the tokens of a turn are gone", name)
    try:
        # The limit counts only where a frame does not tell its size; then the size is checked.
        if zstandard.frame_content_size(data) > MESSAGE_BYTES_MAX:
            raise _refusal("the tokens of a turn are too large to send", name)
        plain = _unpacker.decompress(data, max_output_size=MESSAGE_BYTES_MAX)
        return ev.TurnPayload.FromString(plain)
    except (zstandard.ZstdError, DecodeError) as error:
        raise _refusal(f"the tokens of a turn cannot be read ({error})", name) from error


def _refusal(problem: str, name: str) -> Refused:
    way_out = "restore the Redis data of this run, or start a new run"
    return Refused(problem, field="payload_key", value=name, way_out=way_out)
