"""vLLM's outputs of one request, put together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from muster.types import RoutedExperts, SamplingMask, SamplingParams
from services.inference.adapters.vllm_outputs import Reply
from services.inference.engine import Finish, Sampling

NUCLEUS = SamplingParams(top_p=0.9, top_k=4)
LAYERS, CHOSEN = 2, 2


def piece(*ids: int, mask: list[list[int]] | None = None, rows: int | None = None) -> Any:
    experts = None if rows is None else np.full((rows, LAYERS, CHOSEN), 3, dtype=np.uint8)
    return SimpleNamespace(
        token_ids=ids,
        logprobs=[{i: SimpleNamespace(logprob=-0.5)} for i in ids],
        sampling_mask=None if mask is None else SimpleNamespace(token_ids=mask),
        routed_experts=experts,
        weight_versions=[SimpleNamespace(version="0", start=0, end=2)],
        finish_reason="length",
    )


def reply(*pieces: Any, experts_from: int = 0, bytes_max: int = 1 << 20, **more: Any) -> Finish:
    params = more.get("params", SamplingParams())
    made = Reply(Sampling("r", (5, 6, 7), params, 2, experts_from=experts_from))
    for one in pieces:
        made.chunk(one)
    output = SimpleNamespace(metrics=None, num_cached_tokens=0)
    return made.finish(output, pieces[-1], {}, bytes_max)


def test_masks_of_all_pieces_are_one() -> None:
    finish = reply(piece(1, mask=[[1, 4]]), piece(2, mask=[[2, 3, 9]]), params=NUCLEUS)

    assert finish.mask == SamplingMask((2, 3), (1, 4, 2, 3, 9))


def test_a_request_without_a_filter_has_no_mask_though_others_of_its_step_had() -> None:
    assert reply(piece(1, mask=[[]]), piece(2, mask=[[]])).mask is None


def test_a_mask_that_is_not_of_every_token_is_none() -> None:
    assert reply(piece(1), piece(2, mask=[[2]]), params=NUCLEUS).mask is None


def test_routing_is_of_what_the_caller_does_not_know() -> None:
    finish = reply(piece(1), piece(2, rows=2), experts_from=2)

    assert finish.experts_from == 2
    row = b"\x03\x00" * LAYERS * CHOSEN  # of the third token of the prompt, of the first sampled
    assert finish.experts == RoutedExperts(LAYERS, CHOSEN, row * 2 + b"\xff\xff" * LAYERS * CHOSEN)


def test_routing_that_is_too_large_is_left_out_and_counted() -> None:
    finish = reply(piece(1), piece(2, rows=4), bytes_max=2 * 5 * LAYERS * CHOSEN - 1)

    assert finish.experts is None
    assert finish.experts_dropped
