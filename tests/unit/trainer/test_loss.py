"""The loss against values worked out by hand, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer.loss import LossParts, LossSettings, policy_loss

SETTINGS = LossSettings(eps_low=0.2, eps_high=0.2, tis_cap=2.0)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(
    current: torch.Tensor, proximal: torch.Tensor, behaviour: torch.Tensor, *advantages: float
) -> LossParts:
    return policy_loss(
        current,
        proximal,
        behaviour,
        t(*advantages),
        tokens_total=len(advantages),
        settings=SETTINGS,
    )


def test_on_policy_the_loss_is_the_mean_advantage() -> None:
    logp = t(-1.0, -2.0)
    parts = loss_of(logp, logp, logp, 1.5, -0.5)
    assert float(parts.total) == pytest.approx(-0.5, abs=1e-12)
    assert (parts.clipped, parts.truncated) == (0, 0)


def test_five_tokens_by_hand() -> None:
    # r: 1.1 free | 1.5 cut to 1.2 | 0.5 with A<0 cut to 0.8 | 1.5 with A<0 free | w cut to 2
    ratio = t(1.1, 1.5, 0.5, 1.5, 1.0)
    proximal = t(-1.0, -1.0, -1.0, -1.0, -1.0)
    behaviour = t(-1.0, -1.0, -1.0, -1.0, -1.0 - math.log(8.0))
    parts = loss_of(proximal + ratio.log(), proximal, behaviour, 1.0, 1.0, -1.0, -1.0, 1.0)
    expected = -(1.1 + 1.2 - 0.8 - 1.5 + 2.0) / 5
    assert float(parts.total) == pytest.approx(expected, abs=1e-12)
    assert (parts.tokens, parts.clipped, parts.truncated) == (5, 2, 1)


def test_weights_below_one_are_not_raised() -> None:
    proximal, behaviour = t(-2.0), t(-2.0 + math.log(10.0))
    assert float(loss_of(proximal, proximal, behaviour, 1.0).total) == pytest.approx(-0.1)


def test_gradient_is_weight_times_ratio_times_advantage() -> None:
    current = t(-1.0, -1.0).requires_grad_()
    parts = loss_of(current, t(-1.0, -1.0), t(-1.0 - math.log(1.5), -1.0), 1.0, -2.0)
    parts.total.backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-1.5 / 2, 2.0 / 2])


def test_correction_carries_no_gradient() -> None:
    proximal, behaviour = t(-1.0).requires_grad_(), t(-1.2).requires_grad_()
    current = t(-1.0).requires_grad_()
    loss_of(current, proximal, behaviour, 1.0).total.backward()
    assert proximal.grad is None
    assert behaviour.grad is None


def test_a_clipped_token_has_no_gradient() -> None:
    current = (t(-1.0) + math.log(1.5)).requires_grad_()
    loss_of(current, t(-1.0), t(-1.0), 1.0).total.backward()
    assert current.grad is not None
    assert current.grad.item() == 0.0


def test_micro_batches_add_up() -> None:
    logp, advantages = t(-1.0, -2.0, -3.0), t(1.0, 0.5, -2.0)
    whole = policy_loss(logp, logp, logp, advantages, tokens_total=3, settings=SETTINGS).total
    parts = [
        policy_loss(
            logp[cut], logp[cut], logp[cut], advantages[cut], tokens_total=3, settings=SETTINGS
        ).total
        for cut in (slice(0, 1), slice(1, 3))
    ]
    assert float(sum(parts)) == pytest.approx(float(whole))
