"""Which ids a CPU engine's sampler could have chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and torch warn at import
VOCABULARY = 7
SHUT = -torch.inf
K = torch.tensor([3, VOCABULARY, VOCABULARY], dtype=torch.int32)
P = torch.tensor([1.0, 0.5, 1.0])
LOGPROBS = torch.tensor(
    [
        [-1.0, SHUT, -1.0, -1.5, SHUT, SHUT, SHUT],
        [SHUT, -0.1, SHUT, SHUT, SHUT, SHUT, -3.0],
        [-2.0] * VOCABULARY,
    ]
)


def sampler(logprobs: torch.Tensor = LOGPROBS) -> Any:
    drawn = torch.zeros(len(logprobs), dtype=torch.int64)
    return SimpleNamespace(
        topk_topp_sampler=SimpleNamespace(forward=lambda *given: (drawn, logprobs))
    )


def test_a_row_with_a_filter_has_what_is_left_and_others_have_nothing() -> None:
    from services.inference.adapters.vllm_masks import KeptTokens

    of = sampler()
    kept = KeptTokens(of)
    of.topk_topp_sampler.forward(LOGPROBS, {}, K, P)
    found = kept.take()

    assert found is not None
    assert found.to_nested_list() == [[0, 2, 3], [1, 6], []]
    assert found.slice_request(1, 1).to_nested_list() == [[1, 6]]
    assert kept.take() is None


def test_a_step_without_filters_has_none() -> None:
    from services.inference.adapters.vllm_masks import KeptTokens

    of = sampler()
    kept = KeptTokens(of)
    of.topk_topp_sampler.forward(LOGPROBS, {}, None, None)

    assert kept.take() is None


@pytest.mark.parametrize(
    ("k", "p", "rows"),
    [
        (K, P, [True, True, False]),
        (K, None, [True, False, False]),
        (None, P, [False, True, False]),
    ],
)
def test_rows_with_a_filter(k: Any, p: Any, rows: list[bool]) -> None:
    from services.inference.adapters.vllm_masks import filtered

    assert filtered(k, p, VOCABULARY).tolist() == rows
