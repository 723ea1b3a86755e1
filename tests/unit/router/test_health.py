"""Which replicas take turns: told as stories of one replica's lives."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from services.router.events import ProbeReplica, ReplicaProbed, ReplicaSilent, ReplicaTold
from services.router.health import Health
from services.router.rules import RouterRules

RULES = RouterRules(
    run="r", owner_epoch=1, probes=True, probe_timeout_s=5.0, probe_pause_s=2.0, wedge_s=30.0
)
TOLD = ReplicaTold("r1", "life-1", 7, True, 1000, 10.0, 16)


def told(**change: object) -> ReplicaTold:
    return msgspec.structs.replace(TOLD, **change)


def passed(health: Health, life: str = "life-1", *, now: float, replica: str = "r1") -> None:
    health.probed(ReplicaProbed(replica, life, True), now)


def failed_probe(health: Health, life: str = "life-1", *, now: float) -> None:
    health.probed(ReplicaProbed("r1", life, False, "no answer in 5 s"), now)


def well(*, now: float = 0.0, replicas: tuple[str, ...] = ("r1",)) -> Health:
    """All of them announced, told of and proven."""
    health = Health(RULES)
    health.listed(replicas, now)
    for replica in replicas:
        health.told(told(replica=replica), 7, now)
    assert [probe.replica for probe in health.due(now)] == sorted(replicas)
    for replica in replicas:
        passed(health, now=now, replica=replica)
    return health


def keep_telling(health: Health, start: int, end: int, **change: object) -> tuple[str, ...]:
    """What it says each second; who was lost meanwhile."""
    lost: tuple[str, ...] = ()
    for now in range(start, end + 1):
        lost += health.told(told(**change), 7, float(now)) + health.lost(float(now))
    return lost


def test_a_new_replica_takes_turns_only_after_a_probe() -> None:
    health = Health(RULES)
    health.listed(("r1",), 0.0)
    assert health.due(0.0) == []
    assert health.why("r1", 0.0) == "r1 has not answered yet"
    health.told(told(), 7, 1.0)
    assert not health.admits("r1", 1.0)
    assert health.due(1.0) == [ProbeReplica("r1", "life-1", 5.0)]
    assert health.due(1.5) == []  # one at a time
    assert health.why("r1", 1.5) == "r1 answers a probe first"
    passed(health, now=2.0)
    assert health.admits("r1", 2.0)
    assert health.why("r1", 2.0) == ""


def test_a_probe_of_a_former_life_proves_nothing() -> None:
    health = Health(RULES)
    health.listed(("r1",), 0.0)
    health.told(told(), 7, 0.0)
    health.due(0.0)
    health.told(told(life="life-2"), 7, 1.0)
    passed(health, "life-1", now=1.5)
    assert not health.admits("r1", 1.5)
    assert health.due(1.5) == [ProbeReplica("r1", "life-2", 5.0)]


def test_failed_probes_are_repeated_after_growing_pauses_up_to_a_bound() -> None:
    health = Health(RULES)
    health.listed(("r1",), 0.0)
    now, sent = 0.0, []
    while len(sent) < 8:
        health.told(told(), 7, now)
        if health.due(now):
            sent.append(now)
            failed_probe(health, now=now)
        now += 1.0
    pauses = [after - before for before, after in itertools.pairwise(sent)]
    assert pauses == [2, 4, 8, 16, 32, 60, 60]
    assert health.why("r1", now) == "r1 is probed again in 59 s: no answer in 5 s"


def test_a_probe_whose_end_is_never_told_counts_as_failed() -> None:
    health = Health(RULES)
    health.listed(("r1",), 0.0)
    health.told(told(), 7, 0.0)
    health.due(0.0)
    keep_telling(health, 1, 22)
    assert health.due(22.0) == []  # after a pause
    health.told(told(), 7, 24.0)
    assert health.due(24.0) == [ProbeReplica("r1", "life-1", 5.0)]


def test_a_restart_under_the_same_id_moves_its_conversations_and_is_proven_anew() -> None:
    health = well()
    assert health.told(told(life="life-2"), 7, 5.0) == ("r1",)
    assert not health.admits("r1", 5.0)
    assert health.told(told(life="life-2"), 7, 6.0) == ()  # named once
    assert health.due(6.0) == [ProbeReplica("r1", "life-2", 5.0)]


def test_another_block_size_is_another_cache() -> None:
    health = well()
    assert health.told(told(block_size=32), 7, 5.0) == ("r1",)
    assert not health.admits("r1", 5.0)


def test_a_restart_with_old_weights_waits_until_it_serves_the_newest() -> None:
    health = well()
    health.told(told(life="life-2", version=6), 7, 5.0)
    assert health.due(5.0) == []
    assert health.why("r1", 5.0) == "r1 serves version 6, an older one than is published"
    health.told(told(life="life-2", version=7), 7, 6.0)
    assert health.due(6.0) == [ProbeReplica("r1", "life-2", 5.0)]
    passed(health, "life-2", now=6.5)
    assert health.admits("r1", 6.5)


def test_a_replica_that_is_well_has_time_to_take_a_version_that_others_serve_already() -> None:
    health = well()
    assert health.told(told(version=7), 8, 1.0) == ()
    assert health.told(told(version=7), 8, 30.0) == ()
    assert health.admits("r1", 30.0)
    assert health.told(told(version=7), 8, 31.0) == ("r1",)
    assert not health.admits("r1", 31.0)


def test_one_that_says_itself_that_it_serves_nothing_is_believed_at_once() -> None:
    health = well()
    assert health.told(told(serving=False, detail="it missed version 8"), 7, 1.0) == ("r1",)
    assert health.why("r1", 1.0) == "r1 serves nothing: it missed version 8"
    health.told(told(), 7, 2.0)
    assert not health.admits("r1", 2.0)  # only after a probe
    assert len(health.due(2.0)) == 1


def test_a_wedge_that_still_answers_is_seen_by_steps_that_stand_still() -> None:
    health = well()
    busy = {"running": 3, "steps": 500}
    assert keep_telling(health, 1, 30, **busy) == ()
    assert health.admits("r1", 30.0)
    assert keep_telling(health, 31, 40, **busy) == ("r1",)
    assert "its engine took no step for 30 s" in health.why("r1", 40.0)


def test_requests_that_wait_in_a_wedged_engine_count_as_work() -> None:
    assert keep_telling(well(), 1, 40, waiting=1, steps=500) == ("r1",)


def test_an_engine_without_work_takes_no_steps_and_is_well() -> None:
    health = well()
    assert keep_telling(health, 1, 100, steps=500) == ()
    assert health.admits("r1", 100.0)


def test_a_wedged_replica_is_probed_and_comes_back_when_it_answers() -> None:
    health = well()
    keep_telling(health, 1, 31, running=1, steps=5)
    health.told(told(steps=6), 7, 33.0)
    assert len(health.due(33.0)) == 1
    passed(health, now=34.0)
    assert health.admits("r1", 34.0)


def test_the_clock_of_a_wedge_starts_anew_with_the_work() -> None:
    health = well()
    keep_telling(health, 1, 50, steps=5)
    assert keep_telling(health, 51, 79, running=1, steps=5) == ()


def test_a_silent_replica_takes_nothing_when_its_credit_is_over_and_is_lost_later() -> None:
    health = well()
    health.silent(ReplicaSilent("r1", "no answer within 2 s"), 1.0)
    assert health.admits("r1", 1.0)
    assert health.suspect("r1", 2.9)
    assert not health.admits("r1", 10.0)
    assert health.why("r1", 12.0) == "r1 has not answered for 12 s: no answer within 2 s"
    assert health.lost(30.9) == ()
    assert health.lost(31.0) == ("r1",)
    assert health.lost(32.0) == ()


def test_a_short_silence_is_forgiven() -> None:
    health = well()
    health.silent(ReplicaSilent("r1", "no answer"), 1.0)
    health.told(told(), 7, 15.0)
    assert health.admits("r1", 15.0)
    assert health.lost(60.0) == ()


def test_who_was_lost_in_silence_is_proven_anew() -> None:
    health = well()
    health.silent(ReplicaSilent("r1", "no answer"), 1.0)
    health.lost(31.0)
    health.told(told(), 7, 40.0)
    assert not health.admits("r1", 40.0)
    assert len(health.due(40.0)) == 1


def test_a_registry_that_was_away_for_a_moment_loses_nobody() -> None:
    health = well()
    assert health.listed((), 1.0) == ()
    assert not health.admits("r1", 1.0)
    assert health.why("r1", 1.0) == "r1 is not announced"
    health.listed(("r1",), 2.0)
    assert health.admits("r1", 2.0)


def test_a_replica_that_left_is_lost_when_its_credit_is_over() -> None:
    health = well()
    health.listed((), 1.0)
    assert health.lost(9.9) == ()
    assert health.lost(10.0) == ("r1",)
    assert health.lost(11.0) == ()


def test_a_silent_replica_that_left_is_gone_at_once() -> None:
    assert well().listed((), 10.0) == ("r1",)


def test_calls_that_fail_in_a_row_make_it_suspect_and_then_unproven() -> None:
    health = well()
    health.failed("r1", 1.0)
    assert health.suspect("r1", 2.9)
    assert not health.suspect("r1", 3.0)
    health.failed("r1", 4.0)
    health.answered("r1", 1.0, 1.0)
    health.failed("r1", 5.0)
    assert health.admits("r1", 5.0)  # not in a row
    health.failed("r1", 5.5)
    health.failed("r1", 6.0)
    assert not health.admits("r1", 6.0)
    assert len(health.due(6.0)) == 1


def test_a_probe_that_fails_while_conversations_are_there_moves_them() -> None:
    health = well()
    for now in (1.0, 2.0, 3.0):
        health.failed("r1", now)
    health.due(3.0)
    assert health.lost(3.5) == ()
    failed_probe(health, now=4.0)
    assert health.lost(4.0) == ("r1",)
    assert health.lost(5.0) == ()


def answered(health: Health, replica: str, times: float, *, count: int = 50) -> None:
    for _ in range(count):
        health.answered(replica, 2.0, 2.0 * times)


@pytest.mark.parametrize("others", [("r2",), ("r2", "r3", "r4")])
def test_how_slow_a_replica_is_is_told_against_the_median(others: tuple[str, ...]) -> None:
    health = well(replicas=("r1", *others))
    for other in others:
        answered(health, other, 1.5)
    answered(health, "r1", 9.0)
    health.told(told(), 7, 1.0)
    assert health.slow("r1") == pytest.approx(6.0, rel=0.05)
    assert health.slow("r2") == pytest.approx(1.0, rel=0.05)
    assert health.admits("r1", 1.0)  # its conversations stay; the placement looks at `slow`


def test_a_few_answers_say_nothing_of_slowness() -> None:
    health = well(replicas=("r1", "r2"))
    answered(health, "r2", 1.0)
    answered(health, "r1", 9.0, count=4)
    health.told(told(), 7, 1.0)
    assert health.slow("r1") == 1.0


def test_slowness_of_long_ago_is_forgotten_once_it_has_nothing_to_do() -> None:
    health = well(replicas=("r1", "r2"))
    answered(health, "r1", 9.0)
    answered(health, "r2", 1.0)
    keep_telling(health, 1, 59)
    assert health.slow("r1") > 5.0
    keep_telling(health, 60, 62)
    assert health.slow("r1") == 1.0


def test_without_probes_everything_announced_takes_turns() -> None:
    health = Health(RouterRules(run="r", owner_epoch=1))
    health.listed(("r1",), 0.0)
    assert health.admits("r1", 1e6)
    assert health.told(told(serving=False), 7, 1.0) == ()
    health.failed("r1", 2.0)
    assert health.suspect("r1", 3.9)
    assert health.admits("r1", 2.0)
    assert health.due(3.0) == []
    assert health.lost(1e6) == ()
    assert health.listed((), 4.0) == ("r1",)


def test_a_fleet_is_starting_until_each_was_proven_once_or_has_had_its_time() -> None:
    health = Health(RULES)
    assert not health.starting(0.0)
    health.listed(("r1", "r2"), 0.0)
    for replica in ("r1", "r2"):
        health.told(told(replica=replica), 7, 0.0)
    health.due(0.0)
    passed(health, now=0.3)
    assert health.starting(0.3)
    assert not health.starting(5.0)  # r2 has had its time
    passed(health, now=0.4, replica="r2")
    assert not health.starting(0.4)
    health.told(told(life="life-2"), 7, 1.0)
    assert not health.starting(1.0)  # a restart is waited for by nobody
