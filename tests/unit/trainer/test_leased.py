"""What a trainer makes of a leased stream: every turn's tokens, or an error that names the turn."""

from __future__ import annotations

import pytest
import zstandard

from muster import codec, segment_codec
from muster.bank_calls import batch_from_pb
from muster.errors import Refused
from muster.types import EpisodeKey, Outcome, OutcomeLabel, SamplingParams, Segment, SegmentKind
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb

LABEL = OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", 1.0)
SEGMENTS = tuple(Segment(SegmentKind.OBSERVATION, (turn, 7)) for turn in range(2))


def _parts(*payloads: bytes) -> list[rb.LeaseBatchResponse]:
    member = ev.BatchMember(group="g", attempts=[0])
    header = rb.LeaseBatchResponse(header=ev.BatchRecord(run="run", step=1, members=[member]))
    part = rb.LeaseBatchResponse()
    one = part.trajectory
    one.group, one.task = "g", "task"
    one.label.CopyFrom(codec.label_to_pb(EpisodeKey("run", "g", 0, 0, 0), LABEL))
    one.sampling.CopyFrom(codec.sampling_to_pb(SamplingParams(1.0, 1.0, 0, 0)))
    for turn, payload in enumerate(payloads):
        one.turns.add(key=f"p:{turn}", payload=payload)
    return [header, part]


def _packed(segment: Segment) -> bytes:
    turn = ev.TurnPayload(segments=[segment_codec.segment_to_pb(segment)])
    return zstandard.ZstdCompressor().compress(turn.SerializeToString())


def test_the_turns_of_a_trajectory_are_joined_in_order() -> None:
    batch = batch_from_pb(_parts(*(_packed(segment) for segment in SEGMENTS)))
    assert batch.trajectories[0].segments == SEGMENTS


def test_a_damaged_turn_is_an_error_that_names_it() -> None:
    with pytest.raises(Refused) as caught:
        batch_from_pb(_parts(_packed(SEGMENTS[0]), _packed(SEGMENTS[1])[:-2]))
    assert caught.value.value == "p:1"
