"""What the engine sampled is laid out token by token, or refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from muster.errors import InvalidInput
from muster.layout import lay_out
from muster.types import (
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    Segment,
    SegmentKind,
    VersionSpan,
)
from tests.unit.trainer.stories import observed, prompt, sampled, trajectory


def test_turns_of_one_context_are_one_sequence() -> None:
    item = trajectory(
        "g", 0, 1.0, [prompt(1, 2), sampled(3, 4, version=0), observed(5), sampled(6, version=1)]
    )
    (sequence,) = lay_out(7, item)
    assert sequence.token_ids == (1, 2, 3, 4, 5, 6)
    assert sequence.sampled == (2, 3, 5)
    assert sequence.versions == (0, 0, 1)
    assert sequence.trajectory == 7


def test_a_context_that_began_anew_is_a_sequence_of_its_own() -> None:
    item = trajectory("g", 0, 1.0, [prompt(1), sampled(2), prompt(8, 9), sampled(3)])
    first, second = lay_out(0, item)
    assert (first.token_ids, second.token_ids) == ((1, 2), (8, 9, 3))


def test_tokens_on_kv_of_an_older_version_are_not_clean() -> None:
    item = trajectory("g", 0, 1.0, [prompt(1), sampled(2, 3, version=4, kv=3)])
    assert lay_out(0, item)[0].clean == (False, False)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingParams(top_p=0.9), "sampling.top_p"),
        (SamplingParams(top_k=40), "sampling.top_k"),
        (SamplingParams(temperature=0.0), "sampling.temperature"),
    ],
)
def test_a_transform_that_is_not_applied_here_is_refused(
    sampling: SamplingParams, field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        lay_out(0, trajectory("g", 0, 1.0, sampling=sampling))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("segments", "problem"),
    [
        ([sampled(1)], "prompt before"),
        ([prompt(1), Segment(SegmentKind.MODEL, (2,), (), (VersionSpan(0, 0, 1, 0),))], "logprobs"),
        ([prompt(1), Segment(SegmentKind.MODEL, (2,), (-1.0,), ())], "spans cover 0 of 1"),
        ([prompt(1), sampled(2, logprob=float("nan"))], "at most 0"),
        ([prompt(1), sampled(2, logprob=0.5)], "at most 0"),
    ],
)
def test_an_incomplete_record_is_refused(segments: list[Segment], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        lay_out(0, trajectory("g", 0, 1.0, segments))


def masked(segment: Segment, *allowed: tuple[int, ...]) -> Segment:
    flat = tuple(id for ids in allowed for id in ids)
    return replace(segment, mask=SamplingMask(tuple(map(len, allowed)), flat))


def test_tokens_know_what_they_were_chosen_from() -> None:
    turn = masked(sampled(3, 4, 6), (3, 9), (), (6,))
    item = trajectory("g", 0, 1.0, [prompt(1), turn], sampling=SamplingParams(top_p=0.9, top_k=4))
    assert lay_out(0, item)[0].allowed == ((3, 9), (), (6,))


def test_one_turn_without_its_mask_is_refused() -> None:
    turns = [prompt(1), masked(sampled(3), (3, 9)), observed(5), sampled(6)]
    with pytest.raises(InvalidInput, match="let the engine return sampling masks"):
        lay_out(0, trajectory("g", 0, 1.0, turns, sampling=SamplingParams(top_p=0.9)))


def test_a_mask_that_shuts_out_its_own_token_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not among those"):
        lay_out(0, trajectory("g", 0, 1.0, [prompt(1), masked(sampled(3), (4, 5))]))


def test_turns_are_runs_of_sampled_tokens() -> None:
    segments = [prompt(1), sampled(2, 3), sampled(4), observed(5), sampled(6), observed(7)]
    (sequence,) = lay_out(0, trajectory("g", 0, 1.0, segments))
    assert sequence.turns == (0, 0, 0, 1)


def test_tokens_of_two_versions_keep_their_own() -> None:
    """An update came in the middle of a reply, and its KV was kept."""
    spans = (VersionSpan(3, 0, 2, 3), VersionSpan(4, 2, 3, 3))
    reply = Segment(SegmentKind.MODEL, (7, 8, 9), (-0.5, -1.0, -2.0), spans)
    (sequence,) = lay_out(0, trajectory("g", 0, 1.0, [prompt(1), reply]))
    assert sequence.versions == (3, 3, 4)
    assert sequence.clean == (True, True, False)
    assert sequence.logprobs == (-0.5, -1.0, -2.0)


def test_routing_of_more_than_one_shape_is_refused() -> None:
    first = replace(prompt(1), experts=RoutedExperts(1, 1, b"\0\0"))
    second = replace(sampled(2), experts=RoutedExperts(1, 2, b"\0\0\1\0"))
    with pytest.raises(InvalidInput, match="more than one shape"):
        lay_out(0, trajectory("g", 0, 1.0, [first, second]))
    short = replace(prompt(1, 2), experts=RoutedExperts(1, 1, b"\0\0"))
    with pytest.raises(InvalidInput, match="not of every token"):
        lay_out(0, trajectory("g", 0, 1.0, [short, sampled(2)]))
