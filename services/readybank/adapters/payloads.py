"""Token payloads of leased siblings.

Owns: reading them from Redis and putting them into the messages of a lease, packed as they are.
Promise: turns in order, byte for byte as the router wrote them; a payload that is gone, too large
or not packed is an error that names it, never a shorter trajectory; at most 3 x AHEAD siblings are
in memory, whatever the size of the batch. Does not cover: what is inside a payload (the reader of a
lease unpacks it with muster/payload.py, which names one that is damaged), when payloads are deleted
(retire.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from muster import codec, payload
from muster.errors import MusterError
from muster.streams import RunStreams
from muster.types import EpisodeKey
from muster.v1 import readybank_pb2 as rb
from services.readybank.events import LeasedGroup, LeasedSibling

AHEAD = 8
Packed = Mapping[str, bytes | None]
Siblings = list[tuple[LeasedGroup, LeasedSibling]]
Window = tuple[Siblings, Packed]
_TOKENS_MAX = payload.BYTES_MAX - (1 << 20)  # of one message; the rest is for keys and the label


async def read(
    streams: RunStreams, groups: Sequence[LeasedGroup], into: asyncio.Queue[Window | MusterError]
) -> None:
    """What is recorded of every sibling, AHEAD at a time, and a window of none at the end.

    An error is the last that comes.
    """
    siblings: Siblings = [(group, sibling) for group in groups for sibling in group.siblings]
    for start in range(0, len(siblings), AHEAD):
        window = siblings[start : start + AHEAD]
        keys = [key for _, sibling in window for key in sibling.payload_keys]
        try:
            found = dict(zip(keys, await streams.payloads(keys), strict=True))
        except MusterError as error:
            await into.put(error)
            return
        await into.put((window, found))
    await into.put(([], {}))


def parts(run: str, window: Window) -> Iterator[rb.LeaseBatchResponse]:
    """Each sibling with its label, and with its turns when the label is valid. Raises Refused.

    One by one: the memory of one serves the next. A window's worth would be given back to the
    kernel and faulted in again each time (measured: twice the cost).
    """
    siblings, found = window
    for group, sibling in siblings:
        yield _part(run, group, sibling, found)


def _part(
    run: str, group: LeasedGroup, sibling: LeasedSibling, found: Packed
) -> rb.LeaseBatchResponse:
    key = EpisodeKey(run, group.group, sibling.sibling, sibling.attempt, 0)
    part = rb.LeaseBatchResponse()
    message = part.trajectory  # filled in place: a copy of all tokens less
    message.group, message.task = group.group, group.task
    message.sibling, message.attempt = sibling.sibling, sibling.attempt
    message.label.CopyFrom(codec.label_to_pb(key, sibling.label))
    message.sampling.CopyFrom(codec.sampling_to_pb(group.sampling))
    if sibling.predicted_kl is not None:
        message.predicted_kl = sibling.predicted_kl
    if sibling.scored_kl is not None:
        message.scored_kl = sibling.scored_kl
    size = 0
    for name in sibling.payload_keys:
        data = found[name]
        if data is None:
            raise payload.refusal("the tokens of a turn are gone", name)
        size += max(len(data), payload.size(name, data))
        if size > _TOKENS_MAX:
            raise payload.refusal(
                "from this turn on, the tokens of an episode are too large to send", name
            )
        message.turns.add(key=name, payload=data)
    return part
