"""What the engine sampled is laid out token by token, or refused."""

from __future__ import annotations

import pytest

from muster.errors import InvalidInput
from muster.types import SamplingParams, Segment, SegmentKind, VersionSpan
from services.trainer.batch import lay_out
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
