"""How a job may sample: what both sides can apply."""

from __future__ import annotations

import pytest

from muster.errors import InvalidInput
from muster.types import Purpose, SamplingParams
from muster.wanted import check_sampling


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=20),
        SamplingParams(top_p=0.95, top_k=1024),
    ],
)
def test_what_the_trainer_can_apply_too_is_taken(sampling: SamplingParams) -> None:
    check_sampling(sampling, tokens_max=4096)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingParams(temperature=0.0), "sampling.temperature"),
        (SamplingParams(top_p=0.0, top_k=20), "sampling.top_p"),
        (SamplingParams(top_p=1.5, top_k=20), "sampling.top_p"),
        (SamplingParams(top_p=0.95), "sampling.top_p"),  # nothing bounds its masks
        (SamplingParams(top_k=1), "sampling.top_k"),  # nothing to learn
        (SamplingParams(top_k=-1), "sampling.top_k"),
        (SamplingParams(top_k=1025), "sampling.top_k"),
    ],
)
def test_what_it_cannot_is_refused_by_name(sampling: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_sampling(sampling)

    assert refused.value.field == field


def test_masks_of_an_episode_have_to_fit_one_message() -> None:
    check_sampling(SamplingParams(top_k=96), tokens_max=65536)
    with pytest.raises(InvalidInput, match="not fit one message"):
        check_sampling(SamplingParams(top_k=97), tokens_max=65536)


def test_an_evaluation_may_be_greedy() -> None:
    check_sampling(SamplingParams(top_k=1), purpose=Purpose.EVALUATE)
