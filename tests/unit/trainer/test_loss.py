"""The loss against values worked out by hand, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer.loss import LossParts, LossSettings, importance, policy_loss

SETTINGS = LossSettings(eps_low=0.2, eps_high=0.2, tis_cap=2.0)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(
    current: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    *advantages: float,
    settings: LossSettings = SETTINGS,
) -> LossParts:
    return policy_loss(
        current,
        proximal,
        behaviour,
        t(*advantages),
        tokens_total=len(advantages),
        settings=settings,
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


MASKED = LossSettings(correction="mis", mis_low=0.5, mis_high=2.0)


def test_masked_tokens_weigh_nothing_and_the_others_their_ratio() -> None:
    # ρ = 0.4 masked | 0.5 kept | 1.5 kept | 2 kept | 2.1 masked
    ratio = t(0.4, 0.5, 1.5, 2.0, 2.1)
    assert importance(ratio, MASKED).tolist() == [0.0, 0.5, 1.5, 2.0, 0.0]


def test_masked_importance_sampling_by_hand() -> None:
    # ρ = 0.25 masked | 1.5 | 3 masked; r = 1.1 everywhere
    proximal = t(-1.0, -1.0, -1.0)
    parts = loss_of(
        proximal + math.log(1.1),
        proximal,
        proximal - t(0.25, 1.5, 3.0).log(),
        *(1.0, 2.0, 1.0),
        settings=MASKED,
    )
    assert float(parts.total) == pytest.approx(-(1.5 * 1.1 * 2.0) / 3, abs=1e-12)
    assert (parts.clipped, parts.truncated) == (0, 2)


def test_without_correction_the_engine_is_ignored() -> None:
    proximal = t(-1.0, -1.0)
    parts = loss_of(
        proximal, proximal, t(-3.0, -0.5), 1.0, 1.0, settings=LossSettings(correction="none")
    )
    assert (float(parts.total), parts.truncated) == (-1.0, 0)


@pytest.mark.parametrize("correction", ["tis", "mis", "none"])
def test_bypass_counts_the_engine_part_once(correction: str) -> None:
    """π_θ/μ = 1.1 stays inside the clip: the objective is 1.1 A, and not 1.1 ρ A."""
    behaviour = t(-1.0)
    settings = LossSettings(correction=correction, bypass=True)  # type: ignore[arg-type]
    parts = loss_of(behaviour + math.log(1.1), t(-0.5), behaviour, 1.0, settings=settings)
    assert float(parts.total) == pytest.approx(-1.1, abs=1e-12)


def test_bypass_clips_the_way_from_the_engine() -> None:
    current = t(-1.0 + math.log(1.5)).requires_grad_()
    settings = LossSettings(correction="none", bypass=True)
    parts = loss_of(current, current.detach(), t(-1.0), 1.0, settings=settings)
    parts.total.backward()
    assert current.grad is not None
    assert float(parts.total.detach()) == pytest.approx(-1.2)
    assert current.grad.item() == 0.0


def test_tokens_of_two_versions_are_each_measured_against_their_own() -> None:
    """Sampled at 0.25 by an older version and at 0.5 by the current one; now 0.5 both."""
    proximal = t(math.log(0.5), math.log(0.5))
    parts = loss_of(proximal, proximal, t(math.log(0.25), math.log(0.5)), 1.0, 1.0)
    assert float(parts.total) == pytest.approx(-(2.0 + 1.0) / 2, abs=1e-12)


@pytest.mark.parametrize("correction", ["tis", "mis", "none"])
@pytest.mark.parametrize("bypass", [False, True])
def test_float32_agrees_with_a_loop_in_float64(correction: str, bypass: bool) -> None:
    chance = torch.Generator().manual_seed(5)
    current, proximal, behaviour, gains = torch.randn(4, 256, generator=chance).unbind()
    current, proximal, behaviour = (-v.abs() for v in (current, proximal, behaviour))
    settings = LossSettings(
        eps_low=0.2,
        eps_high=0.28,
        correction=correction,  # type: ignore[arg-type]
        bypass=bypass,
    )
    wanted = 0.0
    columns = zip(*(v.tolist() for v in (current, proximal, behaviour, gains)), strict=True)
    for now, before, engine, gain in columns:
        anchor = engine if bypass else before
        rho = math.exp(anchor - engine)
        weight = {"tis": min(rho, 2.0), "mis": rho if 0.5 <= rho <= 5.0 else 0.0, "none": 1.0}
        ratio = math.exp(now - anchor)
        clipped = min(max(ratio, 0.8), 1.28)
        wanted -= weight[correction] * min(ratio * gain, clipped * gain) / 256
    found = policy_loss(
        current, proximal, behaviour, gains, tokens_total=256, settings=settings
    ).total
    assert float(found) == pytest.approx(wanted, rel=1e-4)
