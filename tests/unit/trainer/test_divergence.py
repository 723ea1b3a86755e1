"""Figures against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer.divergence import log_ratio, mismatch, step_kl

LN2, LN4 = math.log(2.0), math.log(4.0)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_mismatch_of_three_tokens() -> None:
    # ρ = 2, 1/2, 4
    found = mismatch(t(-3.0, -3.0, -3.0), t(-3.0 + LN2, -3.0 - LN2, -3.0 + LN4), bounds=(0.0, 2.5))
    assert found.tokens == 3
    assert found.k1 == pytest.approx(-(LN2 - LN2 + LN4) / 3, rel=1e-6)
    assert found.k3 == pytest.approx(((1 - LN2) + (-0.5 + LN2) + (3 - LN4)) / 3, rel=1e-6)
    assert found.max_abs == pytest.approx(LN4, rel=1e-6)
    assert found.ess_fraction == pytest.approx(6.5**2 / (3 * 20.25), rel=1e-6)
    assert found.truncated_share == pytest.approx(1 / 3)


def test_equal_policies_do_not_differ() -> None:
    found = mismatch(t(-1.0, -2.0), t(-1.0, -2.0), bounds=(0.0, 2.0))
    assert (found.k1, found.k3, found.max_abs, found.ess_fraction) == (0.0, 0.0, 0.0, 1.0)


def test_effective_sample_size_is_of_raw_weights() -> None:
    # Weights cut to [1/2, 2] could never fall below 0.64: one huge weight must show.
    found = mismatch(t(-9.0, *[-1.0] * 9), t(-1.0, *[-1.0] * 9), bounds=(0.0, 2.0))
    assert found.ess_fraction < 0.11


def test_no_tokens_no_mismatch() -> None:
    assert mismatch(t(), t(), bounds=(0.0, 2.0)).tokens == 0


def test_log_ratios_are_clamped_before_exp() -> None:
    assert log_ratio(t(-1.0), t(-500.0)).item() == 20.0


def test_step_kl_on_policy_is_the_mean_of_k3() -> None:
    before, after = t(-1.0, -1.0), t(-1.0 + LN2, -1.0 - LN2)
    expected = ((1 - LN2) + (-0.5 + LN2)) / 2
    assert step_kl(before, after, before, tis_cap=2.0) == pytest.approx(expected, rel=1e-6)


def test_step_kl_weighs_tokens_of_another_policy() -> None:
    # First token twice as likely under v as when it was sampled: it counts twice.
    before, after, mu = t(-1.0, -1.0), t(-1.0 + LN2, -1.0), t(-1.0 - LN2, -1.0)
    assert step_kl(before, after, mu, tis_cap=2.0) == pytest.approx(2 * (1 - LN2) / 3, rel=1e-6)


def test_step_kl_agrees_with_the_exact_divergence() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, generator=generator, dtype=torch.float64)
    moved = logits + 0.1 * torch.randn(8, generator=generator, dtype=torch.float64)
    p, q = logits.log_softmax(0), moved.log_softmax(0)
    exact = float((p.exp() * (p - q)).sum())
    drawn = torch.multinomial(p.exp(), 200_000, replacement=True, generator=generator)
    assert step_kl(p[drawn], q[drawn], p[drawn], tis_cap=2.0) == pytest.approx(exact, rel=0.03)


def test_mean_distance_and_percentiles() -> None:
    """1,001 ratios from 0.5 to 1.5: the percentiles are the second and the last but one."""
    ratios = torch.linspace(0.5, 1.5, 1001, dtype=torch.float64)
    found = mismatch(torch.full_like(ratios, -3.0), -3.0 + ratios.log(), bounds=(0.0, 2.0))
    assert (found.ratio_p01, found.ratio_p999) == pytest.approx((0.501, 1.499))
    assert found.mean_abs == pytest.approx(float(ratios.log().abs().mean()))


def test_percentiles_lie_between_the_two_nearest() -> None:
    found = mismatch(t(-3.0, -3.0), t(-3.0, -3.0 + LN2), bounds=(0.0, 2.0))
    assert (found.ratio_p01, found.ratio_p999) == pytest.approx((1.001, 1.999), rel=1e-6)


def test_effective_turns_are_of_products() -> None:
    """Two turns, of ρ = 2·2 and of 1/2: (4 + 1/2)² / (2 · (16 + 1/4))."""
    proximal = t(-3.0 + LN2, -3.0 + LN2, -3.0 - LN2)
    turns = torch.tensor([7, 7, 9])
    found = mismatch(t(-3.0, -3.0, -3.0), proximal, bounds=(0.0, 2.0), turns=turns)
    assert found.ess_turn == pytest.approx(4.5**2 / (2 * 16.25), rel=1e-6)
    assert found.ess_fraction == pytest.approx(4.5**2 / (3 * 8.25), rel=1e-6)


def test_the_product_of_a_long_turn_is_clamped() -> None:
    behaviour, proximal = torch.full((900,), -1.0), torch.full((900,), -0.9)
    turns = torch.tensor([0] * 899 + [1])
    found = mismatch(behaviour, proximal, bounds=(0.0, 2.0), turns=turns)
    assert found.ess_turn == pytest.approx(0.5, abs=1e-6)


def test_truncated_are_those_outside_either_bound() -> None:
    proximal = t(-3.0 - LN4, -3.0, -3.0 + LN4, -3.0 + LN2)
    found = mismatch(t(-3.0, -3.0, -3.0, -3.0), proximal, bounds=(0.5, 2.5))
    assert found.truncated_share == 0.5
