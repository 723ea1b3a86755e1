"""The mismatch by lag and position."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer.ledger import LAG_MAX, StepLedger
from services.trainer.lineage import NO_PARENT, Lineage
from services.trainer.loss import LossSettings
from services.trainer.plan import plan_step
from tests.unit.trainer.stories import batch, group, observed, prompt, sampled, trajectory

LN2 = math.log(2.0)


def line(versions: int) -> Lineage:
    return Lineage({v: v - 1 if v else NO_PARENT for v in range(versions)}, versions - 1)


def ledger_of(segments: list, lineage: Lineage, *delta: float) -> StepLedger:  # type: ignore[type-arg]
    """Of one trajectory's tokens; log π_p − log μ as given."""
    items = [trajectory("g", 0, 1.0, segments), *group("g", 1.0, None)[1:]]
    made = StepLedger(plan_step(batch(*items), lineage), LossSettings())
    made.proximal = made.behaviour + torch.tensor(delta)
    return made


def test_tokens_are_told_apart_by_lag_and_position() -> None:
    turns = [
        prompt(*range(1, 255)),
        sampled(3, 4, 5, version=1),  # at 254, 255 and 256
        observed(6),
        sampled(7, version=2),
    ]
    made = ledger_of(turns, line(3), LN2, LN2, -LN2, 0.0)
    found = [(b.lag_versions, b.position_from, b.position_to, b.found) for b in made.buckets()]
    assert [(*key, f.tokens) for *key, f in found] == [
        (0, 256, 1024, 1),
        (1, 0, 256, 2),
        (1, 256, 1024, 1),
    ]
    assert [f.k1 for *_, f in found] == pytest.approx([0.0, -LN2, LN2])
    assert sum(f.tokens for *_, f in found) == made.mismatch([0]).tokens


def test_tokens_on_older_kv_are_in_no_bucket() -> None:
    turns = [prompt(1), sampled(2, 3, version=1, kv=0), sampled(4, version=1)]
    made = ledger_of(turns, line(2), 9.0, 9.0, 0.0)
    (only,) = made.buckets()
    assert (only.lag_versions, only.found.tokens, only.found.max_abs) == (0, 1, 0.0)


def test_what_is_very_old_is_one_bucket() -> None:
    turns = [prompt(1), sampled(2, version=0), sampled(3, version=1)]
    (only,) = ledger_of(turns, line(LAG_MAX + 4), 0.0, 0.0).buckets()
    assert (only.lag_versions, only.found.tokens) == (LAG_MAX, 2)


def test_turns_of_other_trajectories_are_other_turns() -> None:
    """Two episodes of one turn each, ρ = 2 and 1/2: not one turn of ρ = 1."""
    plan = plan_step(
        batch(*(trajectory("g", i, float(i), [prompt(1), sampled(2)]) for i in range(2))), line(1)
    )
    made = StepLedger(plan, LossSettings())
    made.proximal = made.behaviour + torch.tensor([LN2, -LN2])
    assert made.mismatch([0, 1]).ess_turn == pytest.approx(2.5**2 / (2 * 4.25))


def test_only_tokens_of_the_current_version_are_on_policy() -> None:
    turns = [prompt(1), sampled(2, version=0), sampled(3, version=1)]
    found = ledger_of(turns, line(2), 5.0, 0.25).on_policy()
    assert found.tokens == 1
    assert found.mean_abs == pytest.approx(0.25)
