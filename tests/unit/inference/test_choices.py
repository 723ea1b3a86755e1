"""What a token was chosen from and which experts it went to, as engines tell it."""

from __future__ import annotations

import struct

import pytest

from muster.errors import InvalidInput
from muster.segment_codec import UNRECORDED
from muster.types import RoutedExperts, SamplingParams
from services.inference.adapters.fake_choices import mask_of, routing_of
from services.inference.routing import laid_out
from services.inference.sampling import check_sampling

ROW = struct.pack("<4H", 1, 2, 3, 4)  # two layers, two experts of each token


def test_the_last_sampled_token_has_no_routing_yet() -> None:
    assert laid_out(ROW * 3, 2, 2, 4) == RoutedExperts(2, 2, ROW * 3 + UNRECORDED * 4)


@pytest.mark.parametrize(("rows", "layers"), [(ROW * 5, 2), (b"", 2), (b"", 0)])
def test_rows_of_no_token_are_nobodys(rows: bytes, layers: int) -> None:
    assert laid_out(rows, layers, 2, 4) is None


@pytest.mark.parametrize(
    ("filtered", "field"),
    [
        (SamplingParams(top_p=0.9), "sampling.top_k"),
        (SamplingParams(top_k=51), "sampling.top_k"),
    ],
)
def test_a_filter_that_nothing_bounds_is_refused(filtered: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_sampling(filtered, mask_ids_max=50)

    assert refused.value.field == field
    assert "50" in refused.value.way_out


def test_a_bounded_filter_is_taken_where_masks_are_told_and_nowhere_else() -> None:
    nucleus = SamplingParams(top_p=0.9, top_k=50)
    assert check_sampling(nucleus, mask_ids_max=50) == nucleus

    with pytest.raises(InvalidInput, match="does not tell"):
        check_sampling(nucleus, mask_ids_max=0)


def test_a_probe_needs_no_mask() -> None:
    greedy = SamplingParams(top_k=1)
    assert check_sampling(greedy, mask_ids_max=0) == greedy


def test_a_scripted_mask_holds_what_was_sampled() -> None:
    mask = mask_of((7, 999), SamplingParams(top_k=3), vocabulary=1000)

    assert mask is not None
    assert mask.counts == (3, 3)
    assert mask.token_ids == (7, 8, 9, 999, 0, 1)
    assert mask_of((7,), SamplingParams(), vocabulary=1000) is None


def test_scripted_routing_is_that_of_the_token_whoever_asks_for_it() -> None:
    tokens = (4, 5, 6, 7)
    whole, later = routing_of(tokens, 0, 2, 2), routing_of(tokens, 2, 2, 2)

    assert whole is not None
    assert later is not None
    assert whole.ids[2 * len(ROW) :] == later.ids
    assert routing_of(tokens, 0, 0, 0) is None
