"""Packed turns come back as they were, or are refused by name."""

from __future__ import annotations

import pytest
import zstandard

from muster import payload
from muster.errors import Refused
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev

TURN = ev.TurnPayload(segments=[pb.Segment(token_ids=bytes(400), logprobs=bytes(8))])
PACKED = zstandard.ZstdCompressor().compress(TURN.SerializeToString())


def _untold(data: bytes) -> bytes:
    """Compressed, in a frame that does not tell its size."""
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


def test_a_turn_comes_back_as_it_was() -> None:
    assert payload.unpacked("p:key", PACKED) == TURN


def test_a_turn_whose_size_is_not_told_comes_back_too() -> None:
    assert payload.unpacked("p:key", _untold(TURN.SerializeToString())) == TURN


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"not zstd", "cannot be read"),
        (PACKED[:-3], "cannot be read"),
        (zstandard.ZstdCompressor().compress(b"\xff\xff"), "cannot be read"),
        (zstandard.ZstdCompressor().compress(bytes(payload.BYTES_MAX + 1)), "too large"),
        (_untold(bytes(payload.BYTES_MAX + 1)), "cannot be read"),
    ],
)
def test_what_is_no_turn_is_refused_by_name(data: bytes, problem: str) -> None:
    with pytest.raises(Refused, match=problem) as caught:
        payload.unpacked("p:key", data)
    assert caught.value.value == "p:key"


def test_a_size_is_known_without_unpacking() -> None:
    assert payload.size("p:key", PACKED) == len(TURN.SerializeToString())


def test_a_bound_holds_for_a_frame_that_tells_its_size() -> None:
    huge = zstandard.ZstdCompressor().compress(bytes(100 << 20))
    assert len(huge) < 1 << 20
    with pytest.raises(Refused, match="too large") as caught:
        payload.plain("o:key", huge, 16 << 20)
    assert caught.value.value == "o:key"


def test_a_bound_holds_for_a_frame_that_does_not_tell_its_size() -> None:
    assert payload.plain("o:key", _untold(bytes(4096)), 4096) == bytes(4096)
    with pytest.raises(Refused, match="cannot be read"):
        payload.plain("o:key", _untold(bytes(1 << 20)), 4096)
