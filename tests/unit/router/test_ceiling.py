"""Too many infrastructure failures, or no room in Redis: launches stop, say why, and go on."""

from __future__ import annotations

import msgspec

from muster.types import JobPolicy, Outcome, OutcomeLabel
from services.router import events as e
from services.router.ceiling import InfraCeiling
from tests.unit.router.world import World, job

VALID = OutcomeLabel(Outcome.MODEL_FAILURE, "not_passed", 0.0)
LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")


def ended(ceiling: InfraCeiling, labels: list[OutcomeLabel], now: float) -> InfraCeiling:
    for label in labels:
        ceiling.ended(label, now)
    return ceiling


def test_a_share_above_the_ceiling_pauses_and_names_the_causes() -> None:
    ceiling = ended(InfraCeiling(0.5, 4, 30.0), [VALID, LOST, LOST, LOST], 100.0)
    assert ceiling.paused(129.9)
    assert "3 of the last 4 attempts failed by infrastructure (host_lost 3)" in ceiling.why(110.0)
    assert "tries again in 20 s" in ceiling.why(110.0)


def test_a_pause_tells_what_failed_last() -> None:
    told = OutcomeLabel(Outcome.INFRA_FAILURE, "box_start", detail="no base for that image")
    assert "; the newest: no base for that image" in (
        ended(InfraCeiling(0.5, 2, 30.0), [LOST, told], 100.0).why(110.0)
    )


def test_a_share_at_the_ceiling_does_not_pause() -> None:
    assert not ended(InfraCeiling(0.5, 4, 30.0), [VALID, VALID, LOST, LOST], 100.0).paused(100.0)


def test_fewer_attempts_than_the_window_prove_nothing() -> None:
    assert not ended(InfraCeiling(0.5, 4, 30.0), [LOST, LOST, LOST], 100.0).paused(100.0)


def test_after_the_pause_the_slate_is_clean() -> None:
    ceiling = ended(InfraCeiling(0.5, 2, 30.0), [LOST, LOST], 100.0)
    assert not ceiling.paused(130.0)
    assert not ended(ceiling, [LOST], 131.0).paused(131.0)


def test_what_was_launched_before_a_pause_does_not_lengthen_it() -> None:
    ceiling = ended(InfraCeiling(0.5, 2, 30.0), [LOST, LOST], 100.0)
    assert not ended(ceiling, [LOST, LOST], 120.0).paused(130.0)


def broken(policy: JobPolicy | None = None) -> World:
    """A run whose boxes never start: every attempt fails."""
    world = World(groups_per_batch=2, lag_max=9, repairs_max=9, infra_pause_s=30.0)
    world.on(e.AcquireBox, lambda c: e.BoxRefused(c.episode, c.host, "no room", retryable=False))
    submitted = job(groups=2)
    if policy is not None:
        spec = msgspec.structs.replace(submitted.job, policy=policy)
        submitted = e.JobSubmitted(spec)
    return world.start().feed(submitted)


def test_a_job_above_its_ceiling_launches_nothing_until_the_pause_is_over() -> None:
    world = broken()
    attempts = len(world.sent(e.AcquireBox))
    assert attempts < 2 * 4  # a batch's worth has failed, and what was launched meanwhile
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert "above infra_ceiling = 0.5" in progress.waiting_for
    world.wait(29.0)
    assert len(world.sent(e.AcquireBox)) == attempts
    world.wait(1.0)
    assert len(world.sent(e.AcquireBox)) > attempts


def test_a_job_may_ask_for_a_ceiling_of_its_own() -> None:
    world = broken(JobPolicy(infra_ceiling=1.0))
    assert len(world.sent(e.AcquireBox)) == 4 * 10  # nothing pauses: all repairs are used up


def test_a_job_may_ask_for_fewer_repairs() -> None:
    world = broken(JobPolicy(infra_ceiling=1.0, repairs_max=1))
    assert len(world.sent(e.AcquireBox)) == 4 * 2


def test_a_full_redis_opens_no_group_but_lets_the_open_ones_end() -> None:
    world = World(groups_per_batch=1, lag_max=9).on(e.Generate, lambda c: None)
    world.start().feed(job(groups=1), e.MemoryTold("Redis uses 101% of its high-water mark"))
    world.feed(job("k", groups=1))
    assert {c.job for c in world.sent(e.OpenGroup)} == {"j"}
    progress = world.machine.progress("k", world.now)
    assert progress is not None
    assert progress.waiting_for.startswith("Redis uses 101%")
    world.feed(e.MemoryTold(""))
    assert {c.job for c in world.sent(e.OpenGroup)} == {"j", "k"}
