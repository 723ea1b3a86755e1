"""Token payloads of leased siblings.

Owns: reading and joining them. Promise: turns in order, bytes as the router wrote them; a payload
that is gone, too large or unreadable is an error that names it, never a shorter trajectory.
Payloads are not deleted at acknowledgement: a trainer that rolls back to an older checkpoint leases
the same steps again. They go with the run's other data.
"""

from __future__ import annotations

import zstandard
from google.protobuf.message import DecodeError

from muster import codec
from muster.errors import Refused
from muster.rpc import MESSAGE_BYTES_MAX
from muster.streams import RunStreams
from muster.types import EpisodeKey
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from services.readybank.events import LeasedGroup, LeasedSibling


async def trajectory(
    streams: RunStreams, group: LeasedGroup, sibling: LeasedSibling
) -> rb.LeasedTrajectory:
    """One sibling with its label, and with its segments when the label is valid."""
    key = EpisodeKey(streams.run, group.group, sibling.sibling, sibling.attempt, 0)
    message = rb.LeasedTrajectory(
        group=group.group,
        task=group.task,
        sibling=sibling.sibling,
        attempt=sibling.attempt,
        label=codec.label_to_pb(key, sibling.label),
        sampling=codec.sampling_to_pb(group.sampling),
    )
    found = await streams.payloads(sibling.payload_keys)
    for name, data in zip(sibling.payload_keys, found, strict=True):
        message.segments.extend(_unpacked(name, data).segments)
    return message


def _unpacked(name: str, data: bytes | None) -> ev.TurnPayload:
    if data is None:
        raise _refusal("the tokens of a turn are gone", name)
    try:
        # The limit counts only where a frame does not tell its size; then the size is checked.
        if zstandard.frame_content_size(data) > MESSAGE_BYTES_MAX:
            raise _refusal("the tokens of a turn are too large to send", name)
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=MESSAGE_BYTES_MAX)
        return ev.TurnPayload.FromString(plain)
    except (zstandard.ZstdError, DecodeError) as error:
        raise _refusal(f"the tokens of a turn cannot be read ({error})", name) from error


def _refusal(problem: str, name: str) -> Refused:
    way_out = "restore the Redis data of this run, or start a new run"
    return Refused(problem, field="payload_key", value=name, way_out=way_out)
