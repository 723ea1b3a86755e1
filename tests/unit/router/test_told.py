"""What an engine chose lands on the tokens that it is of."""

from __future__ import annotations

import struct

import pytest

from muster.errors import Unavailable
from muster.segment_codec import UNRECORDED
from muster.types import RoutedExperts, SamplingMask, SamplingParams, Segment, SegmentKind
from muster.v1 import common_pb2 as pb
from muster.v1 import inference_pb2 as inf
from services.router.adapters.replies import told_of
from services.router.conversation import Conversation
from services.router.events import Message
from services.router.told import Told
from tests.unit.router.test_conversation import Letters, opened, said

NUCLEUS = SamplingParams(top_p=0.9, top_k=4)
MASK = pb.SamplingMask(counts=struct.pack("<2i", 1, 2), token_ids=struct.pack("<3i", 7, 8, 9))


def rows(start: int, end: int) -> bytes:
    """One layer, one expert: the token's place in the context."""
    return struct.pack(f"<{end - start}H", *range(start, end))


def routing(start: int, end: int) -> RoutedExperts:
    return RoutedExperts(1, 1, rows(start, end))


def of(segment: Segment) -> bytes | None:
    return segment.experts.ids if segment.experts else None


def turn(conversation: Conversation, told: Told, text: str = "go") -> tuple[Segment, ...]:
    conversation.reply(*said(text), (), told)
    return conversation.take_segments()


def test_every_token_of_a_turn_has_the_row_of_its_place() -> None:
    conversation = opened()
    prompt = len(conversation)
    assert conversation.recorded == 0
    first = turn(conversation, Told(experts=routing(0, prompt + 3)))
    assert [of(s) for s in first] == [rows(0, prompt), rows(prompt, prompt + 3)]

    conversation.observe(Message("user", "ok"))
    start, end = conversation.recorded, len(conversation)
    assert start == prompt + 3
    later = turn(conversation, Told(experts=routing(start, end + 3), experts_from=start))
    assert [of(s) for s in later] == [rows(start, end), rows(end, end + 3)]


def test_tokens_that_the_replica_does_not_tell_are_unrecorded() -> None:
    conversation = opened()
    prompt = len(conversation)
    first = turn(
        conversation, Told(experts=routing(prompt - 1, prompt + 3), experts_from=prompt - 1)
    )
    assert of(first[0]) == UNRECORDED * (prompt - 1) + rows(prompt - 1, prompt)

    conversation = opened()
    first = turn(conversation, Told(experts=routing(prompt, prompt + 3), experts_from=prompt))
    assert [of(s) for s in first] == [None, rows(prompt, prompt + 3)]


def test_a_chat_that_is_rendered_anew_is_routed_from_its_beginning() -> None:
    conversation = opened(Letters(appendable=False))
    turn(conversation, Told())
    conversation.observe(Message("user", "ok"))
    assert conversation.recorded == 0
    prompt = len(conversation)
    later = turn(conversation, Told(experts=routing(0, prompt + 3)))

    assert [s.kind for s in later] == [SegmentKind.PROMPT, SegmentKind.MODEL]
    assert [of(s) for s in later] == [rows(0, prompt), rows(prompt, prompt + 3)]


def test_a_reply_that_was_taken_back_leaves_no_mask() -> None:
    conversation = opened()
    conversation.reply(*said("no"), (), Told(SamplingMask((1, 1, 1), (5, 5, 5))))
    conversation.take_back()
    mask = SamplingMask((1, 1, 1), (6, 6, 6))
    *_, model = turn(conversation, Told(mask))

    assert model.mask == mask


def test_routing_is_left_out_once_an_episode_has_as_much_as_a_message_takes() -> None:
    conversation = opened()
    prompt = len(conversation)
    conversation.routing_bytes_max = 2 * (prompt + 3)
    assert of(turn(conversation, Told(experts=routing(0, prompt + 3)))[0]) is not None

    conversation.observe(Message("user", "ok"))
    start, end = conversation.recorded, len(conversation)
    later = turn(conversation, Told(experts=routing(start, end + 3), experts_from=start))
    assert [of(s) for s in later] == [None, None]


def test_what_a_former_router_recorded_counts_too() -> None:
    before = opened()
    prompt = len(before)
    recorded = turn(before, Told(experts=routing(0, prompt + 3)))
    after = Conversation(Letters())
    after.routing_bytes_max = 2 * (prompt + 3)
    after.restore((Message("system", "S"), Message("user", "U")), [recorded], ())
    after.observe(Message("user", "ok"))
    start, end = after.recorded, len(after)
    assert start == prompt + 3

    later = turn(after, Told(experts=routing(start, end + 3), experts_from=start))
    assert [of(s) for s in later] == [None, None]


def finish(**told: object) -> inf.GenerateFinish:
    return inf.GenerateFinish(**told)  # type: ignore[arg-type]


def test_a_filtered_turn_without_a_mask_has_failed() -> None:
    with pytest.raises(Unavailable, match="top-p and top-k"):
        told_of(finish(), NUCLEUS, 10, 2)
    assert told_of(finish(), SamplingParams(), 10, 2) == Told()
    assert told_of(finish(), NUCLEUS, 10, 0) == Told()


def test_a_mask_is_of_every_sampled_token_or_the_turn_has_failed() -> None:
    told = told_of(finish(mask=MASK), NUCLEUS, 10, 2)
    assert told.mask == SamplingMask((1, 2), (7, 8, 9))

    with pytest.raises(Unavailable, match="2 tokens, not of 3"):
        told_of(finish(mask=MASK), NUCLEUS, 10, 3)
    broken = pb.SamplingMask(counts=struct.pack("<2i", 1, 2), token_ids=b"")
    with pytest.raises(Unavailable, match="cannot be read"):
        told_of(finish(mask=broken), NUCLEUS, 10, 2)


@pytest.mark.parametrize(
    ("ids", "start"), [(rows(8, 11), 8), (rows(0, 12)[:-1], 0), (rows(0, 13), -1)]
)
def test_routing_that_does_not_fit_is_left_out(ids: bytes, start: int) -> None:
    experts = pb.RoutedExperts(layers=1, per_token=1, ids=ids)
    told = told_of(finish(experts=experts, experts_from=start), SamplingParams(), 10, 2)

    assert told.experts is None


def test_routing_that_fits_is_told() -> None:
    experts = pb.RoutedExperts(layers=1, per_token=1, ids=rows(8, 12))
    told = told_of(finish(experts=experts, experts_from=8), SamplingParams(), 10, 2)

    assert told == Told(None, routing(8, 12), 8)
