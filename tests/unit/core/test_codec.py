"""Carriers survive the wire; what has no twin there is an error."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import codec, segment_codec
from muster import types as t
from muster.errors import InvalidInput
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from muster.v1 import inference_pb2 as inf
from muster.v1 import sandbox_pb2 as sbx

INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
FLOATS = st.floats(allow_nan=False)
F32 = st.floats(width=32, allow_nan=False)
SPANS = st.lists(st.builds(t.VersionSpan, INT64, INT32, INT32, INT64), max_size=3).map(tuple)
KEYS = st.builds(t.EpisodeKey, TEXT, TEXT, INT32, INT32, INT64)


@given(st.lists(INT32))
def test_ids_round_trip_as_little_endian_int32(ids: list[int]) -> None:
    packed = codec.pack_ids(ids)
    assert packed == b"".join(i.to_bytes(4, "little", signed=True) for i in ids)
    assert codec.unpack_ids(packed) == ids


@given(st.lists(F32))
def test_logprobs_round_trip_as_little_endian_float32(values: list[float]) -> None:
    packed = codec.pack_f32(values)
    assert packed == b"".join(struct.pack("<f", v) for v in values)
    assert codec.unpack_f32(packed) == values


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1], [0, 1 << 40]])
def test_an_id_outside_int32_is_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidInput) as caught:
        codec.pack_ids(ids)
    assert caught.value.field == "token_ids"


def test_a_logprob_outside_float32_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        codec.pack_f32([0.0, 1e39])
    assert caught.value.field == "logprobs"


@pytest.mark.parametrize("unpack", [codec.unpack_ids, codec.unpack_f32])
def test_a_cut_array_is_refused(unpack: Callable[[bytes], object]) -> None:
    with pytest.raises(InvalidInput, match="multiple of 4"):
        unpack(b"12345")


ENUMS: list[tuple[type[StrEnum], Any, Callable[[Any], int], Callable[[int], Any]]] = [
    (t.Outcome, pb.Outcome, codec.outcome_to_pb, codec.outcome_from_pb),
    (t.Fate, ev.Fate, codec.fate_to_pb, codec.fate_from_pb),
    (t.StepLimit, sbx.StepLimit, codec.limit_to_pb, codec.limit_from_pb),
    (t.VerdictStatus, sbx.VerdictStatus, codec.verdict_to_pb, codec.verdict_from_pb),
    (t.FinishReason, inf.FinishReason, codec.finish_to_pb, codec.finish_from_pb),
]
IDS = [kind.__name__ for kind, *_ in ENUMS]


@pytest.mark.parametrize(("kind", "proto", "to_pb", "from_pb"), ENUMS, ids=IDS)
def test_enum_values_have_twins_in_both_directions(
    kind: type[StrEnum], proto: Any, to_pb: Callable[[Any], int], from_pb: Callable[[int], Any]
) -> None:
    assert [from_pb(to_pb(member)) for member in kind] == list(kind)
    assert {to_pb(member) for member in kind} == set(proto.values()) - {0}


@pytest.mark.parametrize(("kind", "proto", "to_pb", "from_pb"), ENUMS, ids=IDS)
def test_an_unspecified_or_unknown_enum_value_is_refused(
    kind: type[StrEnum], proto: Any, to_pb: Callable[[Any], int], from_pb: Callable[[int], Any]
) -> None:
    for number in (0, 99):
        with pytest.raises(InvalidInput) as caught:
            from_pb(number)
        assert caught.value.value == str(number)


def test_every_segment_kind_and_episode_state_has_a_twin() -> None:
    assert len(t.SegmentKind) == len(pb.SegmentKind.values()) - 1
    assert len(t.EpisodeState) == len(pb.EpisodeState.values()) - 1


@st.composite
def segments(draw: st.DrawFn) -> t.Segment:
    kind = draw(st.sampled_from(t.SegmentKind))
    ids = tuple(draw(st.lists(INT32, max_size=5)))
    sampled = kind is t.SegmentKind.MODEL
    logprobs = tuple(draw(F32) for _ in ids) if sampled else ()
    experts = t.RoutedExperts(2, 1, draw(st.binary(min_size=4 * len(ids), max_size=4 * len(ids))))
    counts = tuple(draw(st.integers(0, 2)) for _ in logprobs)
    mask = t.SamplingMask(counts, tuple(draw(INT32) for _ in range(sum(counts))))
    return t.Segment(
        kind,
        ids,
        logprobs,
        draw(SPANS) if sampled else (),
        draw(st.sampled_from((None, experts))),
        draw(st.sampled_from((None, mask))) if sampled else None,
    )


@given(segments())
def test_segments_round_trip(segment: t.Segment) -> None:
    wire = segment_codec.segment_to_pb(segment).SerializeToString()
    assert segment_codec.segment_from_pb(pb.Segment.FromString(wire)) == segment


@pytest.mark.parametrize(
    ("kind", "logprobs"),
    [
        (pb.SEGMENT_KIND_MODEL, 1),
        (pb.SEGMENT_KIND_MODEL, 3),
        (pb.SEGMENT_KIND_PROMPT, 2),
        (pb.SEGMENT_KIND_OBSERVATION, 2),
    ],
)
def test_logprobs_that_do_not_fit_the_tokens_are_refused(
    kind: pb.SegmentKind.ValueType, logprobs: int
) -> None:
    message = pb.Segment(
        kind=kind, token_ids=codec.pack_ids([1, 2]), logprobs=codec.pack_f32([0.0] * logprobs)
    )
    with pytest.raises(InvalidInput) as caught:
        segment_codec.segment_from_pb(message)
    assert (caught.value.field, caught.value.value) == ("segment.logprobs", str(logprobs))


@given(KEYS)
def test_keys_round_trip(key: t.EpisodeKey) -> None:
    wire = codec.key_to_pb(key).SerializeToString()
    assert codec.key_from_pb(pb.EpisodeKey.FromString(wire)) == key


@given(st.builds(t.SamplingParams, F32, F32, st.integers(0, 2**31 - 1), st.integers(0, 2**64 - 1)))
def test_sampling_round_trips(value: t.SamplingParams) -> None:
    wire = codec.sampling_to_pb(value).SerializeToString()
    assert codec.sampling_from_pb(pb.SamplingParams.FromString(wire)) == value


@given(
    st.lists(
        st.builds(t.StateInterval, st.sampled_from(t.EpisodeState), FLOATS, FLOATS), max_size=4
    ).map(tuple)
)
def test_intervals_round_trip(values: tuple[t.StateInterval, ...]) -> None:
    message = ev.EpisodeFinished(intervals=codec.intervals_to_pb(values))
    again = ev.EpisodeFinished.FromString(message.SerializeToString())
    assert codec.intervals_from_pb(again.intervals) == values


LABELS = st.builds(
    t.OutcomeLabel,
    st.sampled_from(t.Outcome),
    TEXT,
    st.none() | FLOATS,
    TEXT,
    FLOATS,
    FLOATS,
    st.booleans(),
    TEXT,
)


@given(KEYS, LABELS)
def test_labels_round_trip_and_keep_no_reward_apart_from_zero(
    key: t.EpisodeKey, label: t.OutcomeLabel
) -> None:
    message = ev.OutcomeLabel.FromString(codec.label_to_pb(key, label).SerializeToString())
    assert codec.key_from_pb(message.episode) == key
    assert codec.label_from_pb(message) == label


@pytest.mark.parametrize(
    ("field", "extra"),
    [
        ("segment.experts", pb.Segment(experts=pb.RoutedExperts(layers=1, per_token=1, ids=b"ab"))),
        ("experts.ids", pb.Segment(experts=pb.RoutedExperts(layers=1, per_token=1, ids=b"abc"))),
        ("experts.ids", pb.Segment(experts=pb.RoutedExperts(layers=0, per_token=1, ids=b""))),
        ("segment.mask", pb.Segment(mask=pb.SamplingMask(counts=codec.pack_ids([0])))),
        ("mask.counts", pb.Segment(mask=pb.SamplingMask(counts=codec.pack_ids([1, 0])))),
        ("mask.counts", pb.Segment(mask=pb.SamplingMask(counts=codec.pack_ids([1, -1])))),
    ],
)
def test_choices_that_do_not_fit_the_tokens_are_refused(field: str, extra: pb.Segment) -> None:
    message = pb.Segment(
        kind=pb.SEGMENT_KIND_MODEL,
        token_ids=codec.pack_ids([1, 2]),
        logprobs=codec.pack_f32([0.0, 0.0]),
    )
    message.MergeFrom(extra)
    with pytest.raises(InvalidInput) as caught:
        segment_codec.segment_from_pb(message)
    assert caught.value.field == field
