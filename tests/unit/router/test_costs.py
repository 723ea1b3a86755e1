"""What a request is thought to cost: the published formulas and the run's own constants."""

from __future__ import annotations

import pytest

from services.router.costs import Costs
from services.router.rules import RouterRules


@pytest.mark.parametrize(
    ("uncached", "want"),
    [(0, 0.066), (1000, 0.066 + 0.057 + 0.0044), (20_000, 0.066 + 1.14 + 1.76)],
)
def test_a_prefill_costs_a_base_and_then_more_than_linearly(uncached: int, want: float) -> None:
    assert Costs().prefill_s(uncached) == pytest.approx(want)


@pytest.mark.parametrize(
    ("running", "context", "want"),
    [(0, 0, 0.0106), (10, 0, 0.0148), (10, 100_000, 0.029)],
)
def test_a_step_grows_with_the_batch_and_with_what_it_attends_to(
    running: int, context: int, want: float
) -> None:
    assert Costs().step_s(running, context) == pytest.approx(want)


def test_the_rules_constants_are_the_costs_constants() -> None:
    rules = RouterRules(
        "r", 1, prefill_base_s=1, prefill_linear_s=2, prefill_square_s=3, decode_base_s=4,
        decode_request_s=5, decode_context_s=6,
    )  # fmt: skip
    assert Costs.of(rules) == Costs(1, 2, 3, 4, 5, 6)
    assert Costs.of(RouterRules("r", 1)) == Costs()
