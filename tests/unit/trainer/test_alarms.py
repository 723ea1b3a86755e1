"""Which figures are told, and what they point to."""

from __future__ import annotations

import math

import pytest

from muster.errors import Refused
from services.trainer.alarms import AlarmLimits, alarms, check_on_policy, limits_of
from services.trainer.config import TrainerConfig
from services.trainer.figures import Mismatch, MismatchBucket, StepFigures

LIMITS = AlarmLimits(k3=0.01, ess_token=0.5, ess_turn=0.1, truncated=0.05, step_kl=0.05)
OFF = AlarmLimits(k3=0.0, ess_token=0.0, ess_turn=0.0, truncated=0.0, step_kl=0.0)


def bucket(lag: int, k3: float, tokens: int = 1000, at: int = 0) -> MismatchBucket:
    return MismatchBucket(lag, at, at + 256, Mismatch(tokens=tokens, k3=k3))


def test_good_figures_are_not_told() -> None:
    figures = StepFigures(step_kl=0.05, mismatch=Mismatch(tokens=9, k3=0.01, ess_fraction=0.5))
    assert alarms(figures, LIMITS) == ()


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        (StepFigures(mismatch=Mismatch(k3=0.02)), "mismatch k3 0.02 per token is above 0.01"),
        (StepFigures(mismatch=Mismatch(ess_fraction=0.4)), "share of tokens 0.4 is below 0.5"),
        (StepFigures(mismatch=Mismatch(ess_turn=0.05)), "share of turns 0.05 is below 0.1"),
        (StepFigures(mismatch=Mismatch(truncated_share=0.06)), "cuts 6.0% of tokens"),
        (StepFigures(step_kl=0.06), "moved the policy by 0.06"),
    ],
)
def test_each_figure_beyond_its_limit_is_told_alone(figures: StepFigures, told: str) -> None:
    (sentence,) = alarms(figures, LIMITS)
    assert told in sentence
    assert alarms(figures, OFF) == ()


@pytest.mark.parametrize(("fresh", "cause"), [(0.02, "so numerics"), (0.001, "so age")])
def test_a_mismatch_is_laid_to_numerics_or_to_age(fresh: float, cause: str) -> None:
    buckets = (bucket(0, fresh), bucket(3, 0.04))
    (sentence,) = alarms(StepFigures(mismatch=Mismatch(k3=0.02), buckets=buckets), LIMITS)
    assert cause in sentence


def test_frozen_weights_must_not_drift_apart_with_lag() -> None:
    flat = StepFigures(buckets=(bucket(0, 0.002), bucket(1, 0.003), bucket(2, 0.002)))
    grown = StepFigures(
        buckets=(bucket(0, 0.002), bucket(2, 0.003), bucket(2, 0.009, at=256), bucket(3, 9.0, 9))
    )
    frozen = AlarmLimits(frozen=True)
    assert alarms(flat, frozen) == ()
    (sentence,) = alarms(grown, frozen)
    assert "k3 is 0.006 at lag 2 and 0.002 at lag 0" in sentence
    assert alarms(grown, AlarmLimits()) == ()


def test_engine_and_trainer_agree_before_the_first_update() -> None:
    assert check_on_policy(Mismatch(tokens=64, mean_abs=0.2), 0.2)
    assert not check_on_policy(Mismatch(tokens=63, mean_abs=9.0), 0.2)
    for far in (0.21, math.nan):
        with pytest.raises(Refused, match=r"trainer\.on_policy_max.*compare type"):
            check_on_policy(Mismatch(tokens=64, mean_abs=far), 0.2)


def test_limits_come_from_the_configuration() -> None:
    config = TrainerConfig(alarm_k3=0.5, alarm_ess_token=0.25, alarm_step_kl=1.0, frozen=True)
    expected = AlarmLimits(k3=0.5, ess_token=0.25, step_kl=1.0, frozen=True)
    assert limits_of(config) == expected
    assert limits_of(TrainerConfig()) == AlarmLimits()
