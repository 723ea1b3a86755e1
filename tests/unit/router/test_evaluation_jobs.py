"""Jobs of evaluation in the router's machine: beside training, and never in its way."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from muster.types import Fate, Outcome, OutcomeLabel, Purpose
from services.router import events as e
from services.router.jobs import JobProgress
from tests.unit.router.world import World, default, failed, job

EVALUATE = Purpose.EVALUATE


def progress(world: World, name: str = "v") -> JobProgress:
    found = world.machine.progress(name, world.now)
    assert found is not None
    return found


def opened(world: World) -> list[str]:
    return [command.group for command in world.sent(e.OpenGroup)]


def test_an_evaluation_opens_all_its_groups_though_the_trainer_waits() -> None:
    world = World(groups_per_batch=1, lag_max=0).start().feed(job("t", groups=3))
    assert opened(world) == ["t-00000"]  # and the trainer never comes for it
    world.feed(job("v", groups=3, size=1, purpose=EVALUATE))
    assert opened(world)[1:] == ["v-00000", "v-00001", "v-00002"]
    assert progress(world).episodes_finished == 3
    assert {c.purpose for c in world.sent(e.OpenGroup) if c.job == "v"} == {EVALUATE}


def test_an_evaluation_takes_nothing_of_the_bound_of_training() -> None:
    world = World(groups_per_batch=2, lag_max=0).start()
    world.feed(job("v", groups=4, size=1, purpose=EVALUATE), job("t", groups=9))
    assert [group for group in opened(world) if group[0] == "t"] == ["t-00000", "t-00001"]


def test_no_more_is_opened_than_can_run() -> None:
    world = World(episodes_max=2).on(e.Generate, nothing).start()
    world.feed(job("v", groups=50, size=2, purpose=EVALUATE))
    assert len(opened(world)) == 1


def nothing(command: e.RouterCommand) -> None:
    return None


def evaluated(world: World, *groups: str) -> World:
    return world.feed(*[e.FateRecorded(group, Fate.EVALUATED) for group in groups])


def test_it_is_done_when_each_of_its_groups_is_evaluated() -> None:
    world = World().start().feed(job("v", groups=2, size=1, purpose=EVALUATE))
    evaluated(world, "v-00000")
    assert str(progress(world).state) == "running"
    evaluated(world, "v-00001")
    last = progress(world)
    assert (str(last.state), last.groups_evaluated, last.groups_trained) == ("done", 2, 0)
    assert last.purpose is EVALUATE


def test_a_fate_that_is_told_before_redis_has_answered_the_router_loses_no_count() -> None:
    """The bank reads the end as soon as it is durable, and may be quicker."""
    world = World().on(e.RecordEpisode, nothing).start()
    world.feed(job("v", size=2, purpose=EVALUATE))
    evaluated(world, "v-00000")
    last = progress(world)
    assert (str(last.state), last.groups_complete, last.episodes_finished) == ("done", 1, 2)
    assert last.outcomes == {"model_success": 2}
    assert not world.machine._episodes
    late = [e.EpisodeRecorded(c.episode) for c in world.sent(e.RecordEpisode)]
    assert progress(world.feed(*late)).episodes_finished == 2
    assert len(world.sent(e.ReleaseBox)) == 2


def test_what_infrastructure_ended_is_made_again_like_in_training() -> None:
    tries: list[str] = []

    def once(command: e.Generate) -> Any:
        tries.append(command.episode.id)
        return failed(command) if command.episode.attempt == 0 else default(command)

    world = World(generate_retries_max=0, repairs_max=1).on(e.Generate, once).start()
    world.feed(job("v", size=1, purpose=EVALUATE))
    assert tries == ["v-00000.0.0", "v-00000.0.1"]
    assert progress(world).repairs == 1


def test_a_restart_goes_on_with_an_evaluation_as_one() -> None:
    world = World(groups_per_batch=1, lag_max=0)
    done = e.SiblingRestored(0, OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", 1.0))
    world.feed(job("v", groups=2, size=1, purpose=EVALUATE))
    world.feed(
        e.JobTotals("v", 0, 0, 1, 1, 0, {"model_success": 1}, (0,), evaluated=1),
        e.GroupRestored("v-00001", "v", 1, (done,)),
    ).start()
    assert (progress(world).groups_evaluated, opened(world)) == (1, [])
    world.feed(job("t", groups=1))
    assert opened(world) == ["t-00000"]  # the group that waits for its fate is in no way
    assert str(progress(evaluated(world, "v-00001")).state) == "done"


def test_a_cancelled_evaluation_ends() -> None:
    world = World().on(e.Generate, nothing).start()
    world.feed(job("v", size=1, purpose=EVALUATE), e.JobCancelled("v"))
    assert str(progress(world).state) == "cancelled"
    assert not world.machine._episodes


def test_it_waits_for_the_bank_and_not_for_the_trainer() -> None:
    world = World(groups_per_batch=4, lag_max=0).start()
    world.feed(job("v", size=1, purpose=EVALUATE))
    told = progress(world).waiting_for
    assert told == "the ready bank: 1 complete groups have no fate yet"
    lines = world.machine.explain("v-00000", world.now, world.now, "logs")
    assert [line.waits_for for line in lines] == ["its fate: the bank counts it"]


def test_an_evaluation_that_ran_is_no_ground_for_comparing_sampling() -> None:
    world = World().start().feed(job("t", groups=1))
    later = replace(job("v", purpose=EVALUATE).job, submitted_unix_s=9.0)
    training = world.feed(e.JobSubmitted(later)).machine.training()
    assert training is not None
    assert training.spec.id == "t"
