"""What is recorded of a turn reads as it was, however it was made."""

from __future__ import annotations

import asyncio

import msgspec
import zstandard

from muster import segment_codec
from muster.types import RoutedExperts, SamplingMask, Segment, SegmentKind, VersionSpan
from muster.v1 import events_pb2 as ev
from services.router.adapters.payloads import Payloads

LONG = tuple(range(10_000))
REPLY = Segment(SegmentKind.MODEL, (7, 8), (-0.5, -0.25), (VersionSpan(3, 0, 2, 3),))


def opening(ids: tuple[int, ...]) -> Segment:
    return Segment(SegmentKind.PROMPT, ids)


def read(data: bytes) -> tuple[Segment, ...]:
    plain = zstandard.ZstdDecompressor().decompress(data)
    return tuple(
        segment_codec.segment_from_pb(s) for s in ev.TurnPayload.FromString(plain).segments
    )


async def test_a_turn_reads_as_its_segments_long_or_short() -> None:
    payloads = Payloads()
    for segments in ((opening(LONG), REPLY), (opening((1, 2)), REPLY), (REPLY,), ()):
        assert read(await payloads.turn(segments)) == segments


async def test_siblings_that_record_the_same_opening_at_once_record_the_same() -> None:
    payloads, shared = Payloads(), opening(LONG)
    async with asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(payloads.turn((shared, REPLY))) for _ in range(8)]
    assert {read(one.result()) for one in made} == {(shared, REPLY)}


async def test_openings_that_are_no_longer_kept_read_right_under_a_reused_identity() -> None:
    payloads = Payloads()
    payloads.kept_tokens_max = 2 * len(LONG)
    for shift in range(12):  # a tuple that is let go leaves its identity to the next
        one = opening(tuple(range(shift, shift + len(LONG))))
        assert read(await payloads.turn((one,))) == (one,)


async def test_what_is_kept_of_openings_is_bounded() -> None:
    payloads = Payloads()
    payloads.kept_tokens_max = 3 * len(LONG)
    kept = [opening(tuple(range(shift, shift + len(LONG)))) for shift in range(9)]
    for one in (*kept, *kept):
        await payloads.turn((one,))
    assert len(payloads._openings) == 3


async def test_siblings_of_one_opening_keep_each_its_own_routing() -> None:
    payloads = Payloads()
    for expert in (b"\x01\x00", b"\x02\x00"):
        experts = RoutedExperts(1, 1, expert * len(LONG))
        routed = msgspec.structs.replace(opening(LONG), experts=experts)
        assert read(await payloads.turn((routed, REPLY))) == (routed, REPLY)


async def test_masks_are_recorded_with_their_tokens() -> None:
    masked = msgspec.structs.replace(REPLY, mask=SamplingMask((2, 1), (7, 9, 8)))
    assert read(await Payloads().turn((masked,))) == (masked,)


def test_what_was_recorded_before_there_were_masks_and_routing_reads_without() -> None:
    old = bytes.fromhex("0a1e0802120807000000080000001a08000000bf000080be2206080318022003")
    assert read(zstandard.ZstdCompressor().compress(old)) == (REPLY,)
