"""Segments as protobuf and back, with what the engine chose on the way.

Owns: `Segment`, `RoutedExperts`, `SamplingMask` on the wire. Promise: exact both ways; what
does not fit its tokens is refused by name. Does not cover: what a loss makes of them (trainer).
"""

from __future__ import annotations

from muster import types as t
from muster.codec import (
    kind_from_pb,
    kind_to_pb,
    pack_f32,
    pack_ids,
    spans_from_pb,
    spans_to_pb,
    unpack_f32,
    unpack_ids,
)
from muster.errors import InvalidInput
from muster.v1 import common_pb2 as pb

UNRECORDED = b"\xff\xff"
"""Expert id of a token whose routing the engine did not tell: the model routes it by itself."""


def segment_to_pb(segment: t.Segment) -> pb.Segment:
    return pb.Segment(
        kind=kind_to_pb(segment.kind),
        token_ids=pack_ids(segment.token_ids),
        logprobs=pack_f32(segment.logprobs),
        spans=spans_to_pb(segment.spans),
        experts=None if segment.experts is None else experts_to_pb(segment.experts),
        mask=None if segment.mask is None else mask_to_pb(segment.mask),
    )


def segment_from_pb(message: pb.Segment) -> t.Segment:
    """Raises InvalidInput when a part of it does not match its tokens."""
    kind = kind_from_pb(message.kind)
    ids = tuple(unpack_ids(message.token_ids))
    logprobs = tuple(unpack_f32(message.logprobs))
    sampled = len(ids) if kind is t.SegmentKind.MODEL else 0
    if len(logprobs) != sampled:
        raise InvalidInput(
            f"{len(ids)} tokens of kind {kind} with {len(logprobs)} log-probabilities",
            field="segment.logprobs",
            value=len(logprobs),
            way_out="one per token of a MODEL segment, none for other kinds",
        )
    experts = experts_from_pb(message.experts) if message.HasField("experts") else None
    if experts is not None and experts.tokens != len(ids):
        raise _unlike("segment.experts", experts.tokens, "one row for each token", len(ids))
    mask = mask_from_pb(message.mask) if message.HasField("mask") else None
    if mask is not None and len(mask.counts) != sampled:
        raise _unlike("segment.mask", len(mask.counts), "one count for each sampled token", sampled)
    return t.Segment(kind, ids, logprobs, spans_from_pb(message.spans), experts, mask)


def experts_to_pb(experts: t.RoutedExperts) -> pb.RoutedExperts:
    return pb.RoutedExperts(layers=experts.layers, per_token=experts.per_token, ids=experts.ids)


def experts_from_pb(message: pb.RoutedExperts) -> t.RoutedExperts:
    """Raises InvalidInput unless the ids are whole rows of uint16."""
    row = 2 * message.layers * message.per_token
    if message.layers < 1 or message.per_token < 1 or len(message.ids) % row:
        raise InvalidInput(
            f"{len(message.ids)} bytes for {message.layers} layers × {message.per_token} experts",
            field="experts.ids",
            value=len(message.ids),
            way_out="pack uint16 ids, [tokens, layers, per_token]",
        )
    return t.RoutedExperts(message.layers, message.per_token, message.ids)


def mask_to_pb(mask: t.SamplingMask) -> pb.SamplingMask:
    return pb.SamplingMask(counts=pack_ids(mask.counts), token_ids=pack_ids(mask.token_ids))


def mask_from_pb(message: pb.SamplingMask) -> t.SamplingMask:
    """Raises InvalidInput unless the counts add up to the ids."""
    counts, ids = tuple(unpack_ids(message.counts)), tuple(unpack_ids(message.token_ids))
    if min(counts, default=0) < 0 or sum(counts) != len(ids):
        raise _unlike("mask.counts", sum(counts), "counts that add up to the ids", len(ids))
    return t.SamplingMask(counts, ids)


def _unlike(field: str, value: int, wanted: str, number: int) -> InvalidInput:
    return InvalidInput(
        f"{value}, not {number}", field=field, value=value, way_out=f"send {wanted}"
    )
