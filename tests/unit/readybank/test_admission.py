"""The verdict on a complete group."""

from __future__ import annotations

import pytest

from muster.types import Outcome, OutcomeLabel, VersionSpan
from services.readybank.admission import Verdict, admit, covered
from services.readybank.assembly import Attempt
from services.readybank.events import BankRules, TurnRecorded
from services.readybank.lineage import Lineage
from sim.builders import INFRA, key, scored, turn


def _attempts(*labels: OutcomeLabel, version: int = 0) -> list[Attempt]:
    return [
        Attempt(0, {0: turn(key("g", n), 0, version=version)}, 1, label)
        for n, label in enumerate(labels)
    ]


def _lineage() -> Lineage:
    """0 → 1 → 3; 2 was left behind by a trainer that rolled back."""
    lineage = Lineage()
    for version, parent in ((1, 0), (2, 1), (3, 1)):
        lineage.see(version, parent, published=False)
    return lineage


@pytest.mark.parametrize(
    ("labels", "version", "verdict", "reason"),
    [
        ((scored(1.0), scored(0.0)), 0, Verdict.ADMIT, ""),
        ((scored(1.0), scored(0.0), INFRA), 3, Verdict.ADMIT, ""),
        ((scored(1.0), INFRA), 0, Verdict.FILTER, "too_few_valid (1 of 2)"),
        ((scored(1.0), scored(0.0)), 2, Verdict.FILTER, "abandoned_version 2 (sibling 0 turn 0)"),
        ((scored(1.0), scored(0.0)), -1, Verdict.FILTER, "unknown_version -1 (sibling 0 turn 0)"),
        ((scored(1.0), scored(0.0)), 9, Verdict.HOLD, "unknown_version 9 (sibling 0 turn 0)"),
        (
            (OutcomeLabel(Outcome.MODEL_SUCCESS, "passed"), scored(0.0)),
            0,
            Verdict.FILTER,
            "no_reward (sibling 0)",
        ),
        (
            (OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", float("nan")), scored(0.0)),
            0,
            Verdict.FILTER,
            "no_reward (sibling 0)",
        ),
    ],
)
def test_verdicts(
    labels: tuple[OutcomeLabel, ...], version: int, verdict: Verdict, reason: str
) -> None:
    found = admit(_attempts(*labels, version=version), BankRules(), _lineage())
    assert (found.verdict, found.reason) == (verdict, reason)


def test_an_infrastructure_failure_does_not_make_contrast() -> None:
    """Its absent reward is no zero: the two valid siblings are equal."""
    rules = BankRules(zero_variance="filter")
    found = admit(_attempts(scored(1.0), scored(1.0), INFRA), rules, Lineage())
    assert found.reason == "zero_variance (all 1)"


def test_groups_without_contrast_are_trained_by_default() -> None:
    found = admit(_attempts(scored(0.0), scored(0.0)), BankRules(), Lineage())
    assert found.verdict is Verdict.ADMIT


def _turn(tokens: int, *spans: tuple[int, int]) -> TurnRecorded:
    return TurnRecorded(
        key("g", 0), 0, "p", tokens, tuple(VersionSpan(0, a, b, 0) for a, b in spans), 0.0
    )


@pytest.mark.parametrize(
    ("tokens", "spans", "whole"),
    [
        (0, [], True),
        (4, [(0, 4)], True),
        (4, [(0, 2), (2, 4)], True),
        (4, [], False),
        (4, [(0, 3)], False),
        (4, [(0, 5)], False),
        (4, [(1, 4)], False),
        (4, [(0, 3), (2, 4)], False),
        (4, [(0, 4), (4, 4)], False),
    ],
)
def test_each_sampled_token_needs_exactly_one_version(
    tokens: int, spans: list[tuple[int, int]], whole: bool
) -> None:
    assert covered(_turn(tokens, *spans)) is whole


def test_kv_cannot_be_newer_than_the_token_sampled_on_it() -> None:
    newer = TurnRecorded(key("g", 0), 0, "p", 4, (VersionSpan(1, 0, 4, 2),), 0.0)
    assert not covered(newer)


def test_the_line_is_the_same_in_whatever_order_records_come() -> None:
    lineage = Lineage()
    for version, parent in ((3, 2), (2, 1), (1, 0)):
        lineage.see(version, parent, published=False)
    assert [lineage.standing(v) for v in (0, 1, 2, 3)] == ["known"] * 4
