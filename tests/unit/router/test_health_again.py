"""What a proof wipes out, and what no proof may be taken for."""

from __future__ import annotations

import pytest

from services.router.events import ReplicaSilent
from services.router.health import Health
from tests.unit.router.test_health import (
    RULES,
    answered,
    failed_probe,
    keep_telling,
    passed,
    told,
    well,
)


def proven_again() -> Health:
    """Three calls failed in a row, and the probe that followed passed."""
    health = well()
    for now in (1.0, 1.1, 1.2):
        health.failed("r1", now)
    assert len(health.due(1.3)) == 1
    passed(health, now=1.5)
    return health


def test_a_passed_probe_ends_the_suspicion() -> None:
    assert not proven_again().suspect("r1", 1.6)


def test_after_a_passed_probe_failures_are_counted_anew() -> None:
    health = proven_again()
    health.failed("r1", 2.0)
    assert health.admits("r1", 2.0)


def test_the_probe_of_a_former_life_is_none_for_the_one_that_is_probed_now() -> None:
    health = well()
    health.told(told(life="life-2"), 7, 1.0)
    assert len(health.due(1.0)) == 1
    passed(health, "life-1", now=1.5)
    assert not health.admits("r1", 1.5)


def test_one_that_says_that_it_serves_nothing_is_not_probed_though_calls_fail() -> None:
    health = well()
    health.told(told(serving=False), 7, 1.0)
    for now in (1.1, 1.2, 1.3):
        health.failed("r1", now)
    assert health.due(1.4) == []


def test_one_that_is_not_announced_is_not_probed() -> None:
    health = well()
    health.listed((), 1.0)
    for now in (1.1, 1.2, 1.3):
        health.failed("r1", now)
    assert health.due(1.4) == []


def test_one_that_was_never_proven_is_gone_at_once_when_it_leaves() -> None:
    health = Health(RULES)
    health.listed(("r1",), 0.0)
    health.told(told(), 7, 0.0)
    assert health.listed((), 1.0) == ("r1",)


def test_a_silence_is_as_long_as_from_its_first_unanswered_look() -> None:
    health = well()
    lost: tuple[str, ...] = ()
    for now in range(1, 32):
        health.silent(ReplicaSilent("r1", "no answer"), float(now))
        lost += health.lost(float(now))
    assert lost == ("r1",)


def test_a_probe_has_time_beyond_its_own_deadline_to_be_told() -> None:
    health = Health(RULES)
    health.listed(("r1",), 0.0)
    health.told(told(), 7, 0.0)
    health.due(0.0)
    keep_telling(health, 1, 19)
    assert health.due(19.0) == []
    passed(health, now=19.5)
    assert health.admits("r1", 19.5)


def test_one_slow_answer_among_many_is_a_tenth_of_the_mean() -> None:
    health = well(replicas=("r1", "r2"))
    for replica in ("r1", "r2"):
        answered(health, replica, 1.0)
    answered(health, "r1", 9.0, count=1)
    health.told(told(), 7, 1.0)
    assert health.slow("r1") == pytest.approx(1.8)


def test_another_life_is_not_as_slow_as_the_former() -> None:
    health = well(replicas=("r1", "r2"))
    answered(health, "r1", 9.0)
    answered(health, "r2", 1.0)
    health.told(told(life="life-2"), 7, 1.0)
    assert health.slow("r1") == 1.0


def test_a_probe_that_failed_has_to_be_repeated_before_it_takes_turns() -> None:
    health = well()
    for now in (1.0, 1.1, 1.2):
        health.failed("r1", now)
    health.due(1.3)
    failed_probe(health, now=1.5)
    assert not health.admits("r1", 1.6)
    assert health.due(1.6) == []
