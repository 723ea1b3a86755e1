"""The composition of a step into the streams.

Owns: that one write. Promise: once it returns, the stream holds this composition and no other, so
what is sent is what every later bank reads. Does not cover: which composition (machine.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from muster.errors import Refused
from muster.streams import RunStreams, StreamEntry
from muster.v1 import events_pb2 as ev
from services.readybank.adapters import feed


async def freeze(
    streams: RunStreams, entry: StreamEntry, fates: Sequence[StreamEntry] = ()
) -> None:
    """Write it, or find that it stands there (a lost answer). Raises Refused when another does.

    `fates`: of groups that are no longer in it, in the same write. Another can stand there when a
    power cut took back an owner's epoch, and it was given again.
    """
    if (await streams.append([entry, *fates]))[0]:
        return
    mine = ev.BatchRecord.FromString(entry.data)
    for message in await streams.read_all(entry.stream):
        try:
            found = ev.BatchRecord.FromString(message.data)
        except DecodeError:
            continue
        if feed.batch_field(found) == entry.dedupe:
            if found == mine:
                return
            break
    raise Refused(
        "another composition of this step, or none that is left, is recorded already",
        field="step",
        value=mine.step,
        way_out="stop, start again and read what is there",
    )
