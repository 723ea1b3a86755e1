"""The router's machine where events come late, twice, or after an end."""

from __future__ import annotations

from muster.types import Outcome
from services.router import events as e
from tests.unit.router.test_machine import labels, silent
from tests.unit.router.world import Answer, World, failed, generated, job, verdict


def busy(world: World) -> tuple[int, int, int]:
    """Boxes, requests in flight and homes that the fleet still counts."""
    fleet = world.machine._fleet
    return (sum(fleet.hosts.boxes.values()), len(fleet.loads.asked), len(fleet.loads.homes))


def test_boxes_refused_before_do_not_use_up_the_turns_own_retries() -> None:
    world = World(box_retries_max=9, generate_retries_max=2)
    world.on(e.AcquireBox, lambda c: e.BoxRefused(c.episode, c.host, "full", retryable=True))
    world.start().feed(job())
    for _ in range(5):
        world.wait(1.0)
    del world.answers[e.AcquireBox]
    world.on(
        e.Generate,
        lambda c: generated(c) if c.retry else failed(c),
    )
    for _ in range(3):
        world.wait(1.0)
    assert [x.outcome for x in labels(world)] == [Outcome.MODEL_SUCCESS] * 2


def test_replies_that_failed_before_do_not_use_up_the_verifiers_own_retry() -> None:
    asked: list[str] = []

    def once(command: e.Verify) -> e.RouterEvent:
        asked.append(command.episode.id)
        if asked.count(command.episode.id) == 1:
            return e.VerifyFailed(command.episode, "away")
        return verdict(command)

    def full(command: e.Generate) -> e.RouterEvent:
        if command.turn == 0:
            return generated(command)
        if command.retry:
            return e.ContextFull(command.episode, command.turn)
        return failed(command)

    world = World(repairs_max=0).on(e.Verify, once).on(e.Generate, full)
    world.start().feed(job(max_turns=2)).wait(5.0)
    assert {str(x.outcome) for x in labels(world)} == {"model_failure"}


def test_cancelling_forgets_boxes_requests_and_homes() -> None:
    world = World().on(e.Generate, silent).start().feed(job())
    assert busy(world) == (2, 2, 2)
    world.feed(e.JobCancelled("j"))
    assert busy(world) == (0, 0, 0)


def test_a_refusal_that_comes_after_its_episode_ended_frees_the_hosts_place() -> None:
    world = World().on(e.AcquireBox, silent).start().feed(job())
    asked = world.sent(e.AcquireBox)
    world.feed(e.JobCancelled("j"))
    world.feed(*(e.BoxRefused(c.episode, c.host, "full", retryable=True) for c in asked))
    assert busy(world) == (0, 0, 0)


def test_a_finished_episode_leaves_nothing_counted() -> None:
    world = World().start().feed(job(max_turns=2))
    assert busy(world) == (0, 0, 0)


def test_a_group_recorded_twice_launches_nothing_twice() -> None:
    world = World(episodes_max=1).start()
    held: list[e.RouterCommand] = []
    world.on(e.RecordEpisode, held.append)  # type: ignore[arg-type]
    world.feed(job(size=2), e.GroupRecorded("j-00000"))
    del world.answers[e.RecordEpisode]
    world.feed(*(e.EpisodeRecorded(c.episode) for c in held))  # type: ignore[attr-defined]
    asked = [c.episode.id for c in world.sent(e.AcquireBox)]
    assert len(asked) == len(set(asked)) == 2


def test_time_lost_to_a_failed_replica_is_not_the_models_time() -> None:
    world = World(episode_timeout_s=50.0)
    world.on(e.Generate, lambda c: generated(c) if c.turn == 0 else None)
    world.on(e.Verify, lambda c: verdict(c, 0.0)).start().feed(job(max_turns=2))
    world.now += 49.0
    for asked in [c for c in world.sent(e.Generate) if c.turn == 1]:
        world.feed(failed(asked, "hung"))
    world.on(e.Generate, silent).wait(1.0).wait(10.0)
    assert not world.sent(e.AbortGenerate)


def test_time_lost_to_a_slow_redis_is_not_the_models_time() -> None:
    world = World(episode_timeout_s=50.0).on(e.RecordTurn, silent)
    world.on(e.Verify, lambda c: verdict(c, 0.0)).start().feed(job(max_turns=2))
    world.now += 60.0
    held = world.sent(e.RecordTurn)
    del world.answers[e.RecordTurn]
    world.feed(*(e.TurnRecorded(c.episode, 0) for c in held))
    assert [x.cause for x in labels(world)] == ["budget_turns"] * 2


def full(times: int, *, of: str = "r0") -> Answer:
    """A replica that takes nothing when it is asked so often."""
    asked: list[int] = []

    def answer(command: e.Generate) -> e.RouterEvent:
        asked.append(command.turn)
        if command.replica != of or len(asked) > times:
            return generated(command)
        why = "5 requests are running"
        return failed(command, why, full=True)

    return answer  # type: ignore[return-value]


def test_a_full_replica_is_waited_for_and_no_retry_is_counted() -> None:
    world = World(generate_retries_max=1, repairs_max=0).on(e.Generate, full(6))
    world.start().feed(job(size=1))
    for _ in range(7):
        world.wait(1.0)
    assert [x.outcome for x in labels(world)] == [Outcome.MODEL_SUCCESS]
    assert [c.retry for c in world.sent(e.Generate)] == list(range(7))


def test_the_wait_for_a_full_replica_is_bounded_as_a_whole() -> None:
    world = World(hold_max_s=5.0, repairs_max=0).on(e.Generate, full(99))
    world.start().feed(job(size=1))
    for _ in range(7):
        world.wait(1.0)
    assert [x.cause for x in labels(world)] == ["engine"]
    assert "5 requests are running" in labels(world)[0].detail


def test_a_replica_that_is_full_is_no_suspect_and_another_one_is_asked() -> None:
    world = World().on(e.Generate, full(1)).start(replicas=2).feed(job(size=1)).wait(1.0)
    assert [c.replica for c in world.sent(e.Generate)] == ["r0", "r1"]
    assert not world.machine._fleet.health.suspect("r0", world.now)


def test_a_command_that_no_box_can_run_is_the_models_and_never_reaches_one() -> None:
    world = World(command_bytes_max=3, unparseable_max=2).start().feed(job(size=1, max_turns=5))
    assert [x.cause for x in labels(world)] == ["unparseable"]
    assert not world.sent(e.Exec)
