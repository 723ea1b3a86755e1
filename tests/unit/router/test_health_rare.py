"""What looks like the end of a replica and is none, and what is none for long."""

from __future__ import annotations

import pytest

from services.router.events import ReplicaProbed, ReplicaSilent
from tests.unit.router.test_health import answered, keep_telling, passed, told, well


def test_an_engine_that_applies_weights_is_not_wedged() -> None:
    health = well()
    assert keep_telling(health, 1, 60, running=3, steps=7, updating=True) == ()
    assert health.admits("r1", 60.0)
    assert keep_telling(health, 61, 89, running=3, steps=7) == ()
    assert keep_telling(health, 90, 91, running=3, steps=7) == ("r1",)


def test_one_that_applies_the_version_that_others_serve_is_not_behind() -> None:
    health = well()
    for now in range(1, 60):
        assert health.told(told(version=7, updating=True), 8, float(now)) == ()
    assert health.told(told(version=7), 8, 88.0) == ()
    assert health.told(told(version=7), 8, 90.0) == ("r1",)


def test_one_that_follows_versions_which_come_faster_than_looks_is_not_old() -> None:
    health = well()
    for now in range(1, 60):
        assert health.told(told(version=7 + now), 8 + now, float(now)) == ()
    assert health.admits("r1", 59.5)


def test_a_probe_that_found_no_place_loses_nobody_and_is_sent_again() -> None:
    health = well()
    for now in (1.0, 2.0, 3.0):
        health.failed("r1", now)
    assert len(health.due(3.0)) == 1
    health.probed(ReplicaProbed("r1", "life-1", False, "32 requests are running", full=True), 4.0)
    assert health.lost(4.0) == ()
    assert "32 requests are running" in health.why("r1", 4.5)
    assert health.due(5.9) == []
    keep_telling(health, 5, 6, running=32, steps=9)
    assert len(health.due(6.0)) == 1
    passed(health, now=6.5)
    assert health.admits("r1", 6.5)


def test_a_passed_probe_begins_the_watch_for_a_wedge_anew() -> None:
    health = well()
    assert keep_telling(health, 1, 31, running=1, steps=7) == ("r1",)
    keep_telling(health, 32, 33, running=1, steps=7)
    assert len(health.due(33.0)) == 1
    passed(health, now=34.0)
    assert health.lost(34.0) == ()
    assert keep_telling(health, 35, 63, running=1, steps=7) == ()
    assert keep_telling(health, 64, 64, running=1, steps=7) == ("r1",)


def test_slowness_is_measured_against_those_that_take_turns() -> None:
    health = well(replicas=("r1", "r2"))
    answered(health, "r1", 10.0)
    answered(health, "r2", 1.0)
    health.silent(ReplicaSilent("r2", "no answer"), 1.0)
    assert keep_telling(health, 1, 30, running=1, steps=1) == ()
    assert health.slow("r1") == pytest.approx(10.0, rel=0.05)
    assert health.lost(31.0) == ("r2",)
    health.told(told(running=1, steps=2), 7, 31.5)
    assert health.slow("r1") == 1.0


def test_who_joins_a_fleet_later_is_waited_for_by_nobody() -> None:
    health = well()
    health.listed(("r1", "r2"), 8.0)
    assert not health.starting(8.0)
