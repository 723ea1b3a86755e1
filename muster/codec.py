"""Carriers to protobuf and back.

Owns: the mapping of muster.types to muster.v1, and packed arrays. Promise: total (an enum value
that has no twin is an error, never a default) and lossless; tests round-trip every carrier.
Token ids travel as little-endian int32, log-probabilities as little-endian float32.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Generic, TypeVar

from muster import types as t
from muster.errors import InvalidInput
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from muster.v1 import inference_pb2 as inf
from muster.v1 import sandbox_pb2 as sbx

E = TypeVar("E", bound=Enum)


def pack_ids(ids: Sequence[int]) -> bytes:
    """int32 little-endian; raises InvalidInput for an id outside int32."""
    try:
        return struct.pack(f"<{len(ids)}i", *ids)
    except struct.error as error:
        raise InvalidInput(
            f"a token id is not an int32: {error}", field="token_ids", way_out="send int32 ids"
        ) from error


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of pack_ids."""
    return list(struct.unpack(f"<{_count(data, 'token_ids')}i", data))


def pack_f32(values: Sequence[float]) -> bytes:
    """float32 little-endian; raises InvalidInput for a value beyond float32."""
    try:
        return struct.pack(f"<{len(values)}f", *values)
    except OverflowError as error:
        raise InvalidInput(
            f"a log-probability is not a float32: {error}",
            field="logprobs",
            way_out="send what the engine computed, as float32",
        ) from error


def unpack_f32(data: bytes) -> list[float]:
    """Inverse of pack_f32 (values are those of float32)."""
    return list(struct.unpack(f"<{_count(data, 'logprobs')}f", data))


def _count(data: bytes, field: str) -> int:
    if len(data) % 4:
        raise InvalidInput(
            "length is not a multiple of 4 bytes",
            field=field,
            value=len(data),
            way_out="pack as little-endian 32-bit values",
        )
    return len(data) // 4


class _EnumMap(Generic[E]):
    """Two-way map between a StrEnum and the numbers of a proto enum."""

    def __init__(self, kind: type[E], prefix: str, proto: object):
        values = dict(proto.items())  # type: ignore[attr-defined]
        self._to = {member: values[f"{prefix}_{member.name}"] for member in kind}
        self._from = {number: member for member, number in self._to.items()}
        self._field = prefix.lower()

    def to_pb(self, member: E) -> int:
        return int(self._to[member])

    def from_pb(self, number: int) -> E:
        if number not in self._from:
            raise InvalidInput(
                "unknown or unspecified value",
                field=self._field,
                value=number,
                way_out=f"one of {sorted(self._from)}",
            )
        return self._from[number]


_KIND = _EnumMap(t.SegmentKind, "SEGMENT_KIND", pb.SegmentKind)
_OUTCOME = _EnumMap(t.Outcome, "OUTCOME", pb.Outcome)
_STATE = _EnumMap(t.EpisodeState, "EPISODE_STATE", pb.EpisodeState)
_PURPOSE = _EnumMap(t.Purpose, "JOB_PURPOSE", pb.JobPurpose)
_FATE = _EnumMap(t.Fate, "FATE", ev.Fate)
_LIMIT = _EnumMap(t.StepLimit, "STEP_LIMIT", sbx.StepLimit)
_VERDICT = _EnumMap(t.VerdictStatus, "VERDICT_STATUS", sbx.VerdictStatus)
_FINISH = _EnumMap(t.FinishReason, "FINISH_REASON", inf.FinishReason)


def kind_to_pb(value: t.SegmentKind) -> pb.SegmentKind.ValueType:
    return pb.SegmentKind.ValueType(_KIND.to_pb(value))


def kind_from_pb(value: int) -> t.SegmentKind:
    return _KIND.from_pb(value)


def outcome_to_pb(value: t.Outcome) -> pb.Outcome.ValueType:
    return pb.Outcome.ValueType(_OUTCOME.to_pb(value))


def outcome_from_pb(value: int) -> t.Outcome:
    return _OUTCOME.from_pb(value)


def fate_to_pb(value: t.Fate) -> ev.Fate.ValueType:
    return ev.Fate.ValueType(_FATE.to_pb(value))


def fate_from_pb(value: int) -> t.Fate:
    return _FATE.from_pb(value)


def purpose_to_pb(value: t.Purpose) -> pb.JobPurpose.ValueType:
    return pb.JobPurpose.ValueType(_PURPOSE.to_pb(value))


def purpose_from_pb(value: int) -> t.Purpose:
    """Records and clients of before there was a choice say nothing, and mean training."""
    return _PURPOSE.from_pb(value or pb.JOB_PURPOSE_TRAIN)


def limit_to_pb(value: t.StepLimit) -> sbx.StepLimit.ValueType:
    return sbx.StepLimit.ValueType(_LIMIT.to_pb(value))


def limit_from_pb(value: int) -> t.StepLimit:
    return _LIMIT.from_pb(value)


def verdict_to_pb(value: t.VerdictStatus) -> sbx.VerdictStatus.ValueType:
    return sbx.VerdictStatus.ValueType(_VERDICT.to_pb(value))


def verdict_from_pb(value: int) -> t.VerdictStatus:
    return _VERDICT.from_pb(value)


def finish_to_pb(value: t.FinishReason) -> inf.FinishReason.ValueType:
    return inf.FinishReason.ValueType(_FINISH.to_pb(value))


def finish_from_pb(value: int) -> t.FinishReason:
    return _FINISH.from_pb(value)


def spans_to_pb(spans: Iterable[t.VersionSpan]) -> list[pb.VersionSpan]:
    return [
        pb.VersionSpan(version=s.version, start=s.start, end=s.end, kv_min_version=s.kv_min_version)
        for s in spans
    ]


def spans_from_pb(spans: Iterable[pb.VersionSpan]) -> tuple[t.VersionSpan, ...]:
    return tuple(t.VersionSpan(s.version, s.start, s.end, s.kv_min_version) for s in spans)


def key_to_pb(key: t.EpisodeKey) -> pb.EpisodeKey:
    return pb.EpisodeKey(
        run=key.run,
        group=key.group,
        sibling=key.sibling,
        attempt=key.attempt,
        owner_epoch=key.owner_epoch,
    )


def key_from_pb(message: pb.EpisodeKey) -> t.EpisodeKey:
    return t.EpisodeKey(
        message.run, message.group, message.sibling, message.attempt, message.owner_epoch
    )


def sampling_to_pb(value: t.SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=value.temperature, top_p=value.top_p, top_k=value.top_k, seed=value.seed
    )


def sampling_from_pb(message: pb.SamplingParams) -> t.SamplingParams:
    return t.SamplingParams(message.temperature, message.top_p, message.top_k, message.seed)


def intervals_to_pb(values: Iterable[t.StateInterval]) -> list[pb.StateInterval]:
    return [
        pb.StateInterval(
            state=pb.EpisodeState.ValueType(_STATE.to_pb(v.state)),
            start_unix_s=v.start_unix_s,
            end_unix_s=v.end_unix_s,
        )
        for v in values
    ]


def intervals_from_pb(values: Iterable[pb.StateInterval]) -> tuple[t.StateInterval, ...]:
    return tuple(
        t.StateInterval(_STATE.from_pb(v.state), v.start_unix_s, v.end_unix_s) for v in values
    )


def label_to_pb(key: t.EpisodeKey, label: t.OutcomeLabel) -> ev.OutcomeLabel:
    return ev.OutcomeLabel(
        episode=key_to_pb(key),
        outcome=outcome_to_pb(label.outcome),
        cause=label.cause,
        has_reward=label.reward is not None,
        reward=label.reward or 0.0,
        limit=label.limit,
        wall_s=label.wall_s,
        cpu_s=label.cpu_s,
        flaky=label.flaky,
        detail=label.detail,
        cpu_stall_s=label.cpu_stall_s,
        replays=label.replays,
    )


def label_from_pb(message: ev.OutcomeLabel) -> t.OutcomeLabel:
    return t.OutcomeLabel(
        outcome=outcome_from_pb(message.outcome),
        cause=message.cause,
        reward=message.reward if message.has_reward else None,
        limit=message.limit,
        wall_s=message.wall_s,
        cpu_s=message.cpu_s,
        flaky=message.flaky,
        detail=message.detail,
        cpu_stall_s=message.cpu_stall_s,
        replays=message.replays,
    )


def policy_to_pb(policy: t.JobPolicy) -> pb.JobPolicy:
    return pb.JobPolicy(
        repairs_max=policy.repairs_max,
        valid_min=policy.valid_min,
        zero_variance=policy.zero_variance,
        infra_ceiling=policy.infra_ceiling,
    )


def policy_from_pb(message: pb.JobPolicy) -> t.JobPolicy:
    return t.JobPolicy(
        repairs_max=message.repairs_max if message.HasField("repairs_max") else None,
        valid_min=message.valid_min if message.HasField("valid_min") else None,
        zero_variance=message.zero_variance if message.HasField("zero_variance") else None,
        infra_ceiling=message.infra_ceiling if message.HasField("infra_ceiling") else None,
    )


def waiting_to_pb(value: t.Waiting) -> pb.Waiting:
    return pb.Waiting(
        subject=value.subject,
        state=value.state,
        waits_for=value.waits_for,
        since_unix_s=value.since_unix_s,
        owner=value.owner,
        next_command=value.next_command,
    )


def waiting_from_pb(message: pb.Waiting) -> t.Waiting:
    return t.Waiting(
        message.subject,
        message.state,
        message.waits_for,
        message.since_unix_s,
        message.owner,
        message.next_command,
    )
