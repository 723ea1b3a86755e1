"""The router's machine as stories."""

from __future__ import annotations

import msgspec

from muster.types import Fate, FinishReason, Outcome, OutcomeLabel, StepLimit, VerdictStatus
from services.router import events as e
from services.router.machine import RouterMachine
from tests.unit.router.world import BLOCK, World, failed, generated, job, stepped, verdict


def labels(world: World) -> list[OutcomeLabel]:
    return [c.label for c in world.sent(e.RecordEpisode)]


def silent(command: e.RouterCommand) -> None:
    return None


# -- one episode -------------------------------------------------------------------------


def test_a_one_turn_episode_is_boxed_sampled_run_recorded_verified_and_labelled() -> None:
    world = World().start().feed(job(size=2))
    first = [type(c).__name__ for c in world.log if getattr(c, "episode", None) is not None]
    story = [n for n in first if n not in ("DropConversation",)]
    for step in ("AcquireBox", "Generate", "Exec", "RecordTurn", "Verify", "ReleaseBox"):
        assert story.count(step) == 2, step
    assert story.index("RecordTurn") < story.index("Verify") < story.index("RecordEpisode")
    assert [x.outcome for x in labels(world)] == [Outcome.MODEL_SUCCESS] * 2


def test_a_turn_is_recorded_before_the_next_is_sampled() -> None:
    world = World().on(e.RecordTurn, silent).start().feed(job(max_turns=3))
    assert {c.turn for c in world.sent(e.Generate)} == {0}


def test_the_observation_of_a_step_is_the_next_turns_message() -> None:
    world = World().start().feed(job(max_turns=2))
    second = next(c for c in world.sent(e.Generate) if c.turn == 1)
    assert second.messages == (e.Message("user", "exit=0 time=0.1s\nhi"),)


def test_done_ends_the_episode_without_a_command() -> None:
    world = World().on(e.Generate, lambda c: generated(c, "All good.\nDONE"))
    world.start().feed(job(max_turns=4))
    assert not world.sent(e.Exec)
    assert len(world.sent(e.RecordTurn)) == 2
    assert labels(world)[0].cause == "passed"


def test_unparseable_replies_in_a_row_end_the_episode_as_scored() -> None:
    world = World(unparseable_max=2).on(e.Generate, lambda c: generated(c, "hmm"))
    world.on(e.Verify, lambda c: verdict(c, 0.0)).start().feed(job(max_turns=9))
    assert len(world.sent(e.RecordTurn)) == 4
    assert {(x.outcome, x.cause) for x in labels(world)} == {(Outcome.MODEL_FAILURE, "unparseable")}


def test_the_models_own_timeout_is_scored_not_dropped() -> None:
    world = World().on(e.Exec, lambda c: stepped(c, limit=StepLimit.TIME, exit_code=137))
    world.on(e.Verify, lambda c: verdict(c, 0.0)).start().feed(job())
    assert labels(world)[0].outcome is Outcome.MODEL_FAILURE
    assert labels(world)[0].limit == "time"


def test_a_box_that_the_agent_broke_is_the_models_failure_and_is_not_verified() -> None:
    world = World().on(e.Exec, lambda c: stepped(c, box_broken=True, limit=StepLimit.MEMORY))
    world.start().feed(job())
    assert not world.sent(e.Verify)
    assert labels(world)[0].cause == "box_broken_by_memory"
    assert labels(world)[0].reward == 0.0


def test_an_ambiguous_verdict_is_given_once_more_and_the_second_stands() -> None:
    given: list[str] = []

    def twice(command: e.Verify) -> e.VerdictGiven:
        given.append(command.episode.id)
        again = given.count(command.episode.id) == 2
        status = VerdictStatus.REWARDED if again else VerdictStatus.TIMEOUT
        return verdict(command, 1.0, status)

    world = World().on(e.Verify, twice).start().feed(job())
    assert len(given) == 4
    assert all(x.flaky and x.outcome is Outcome.MODEL_SUCCESS for x in labels(world))


def test_time_that_the_model_used_up_ends_the_episode_and_what_is_there_is_scored() -> None:
    world = World(episode_timeout_s=50).on(e.Exec, lambda c: stepped(c, wall_s=49.5))
    world.on(e.Verify, lambda c: verdict(c, 0.0)).start().feed(job(max_turns=9))
    assert len(world.sent(e.Exec)) == 2
    assert {(x.outcome, x.cause) for x in labels(world)} == {(Outcome.MODEL_FAILURE, "budget_time")}


def test_a_command_gets_no_more_time_than_its_episode_has_left() -> None:
    world = World(episode_timeout_s=12, step_timeout_s=10).on(
        e.Exec, lambda c: stepped(c, wall_s=5.0)
    )
    world.start().feed(job(size=2, max_turns=2))
    assert sorted({c.timeout_s for c in world.sent(e.Exec)}) == [12 - 1 - 5 - 1, 10.0]


def test_an_engine_that_says_nothing_is_never_the_models_failure() -> None:
    world = World(episode_timeout_s=50, generate_retries_max=2)
    world.on(e.Generate, lambda c: failed(c, "deadline"))
    world.start().feed(job())
    for _ in range(40):
        world.wait(60.0)
    assert {(x.outcome, x.cause) for x in labels(world)} == {(Outcome.INFRA_FAILURE, "engine")}


def test_retries_of_a_turn_outlast_the_listing_of_a_dead_replica() -> None:
    world = World(generate_retries_max=5)
    world.on(e.Generate, lambda c: failed(c, "refused"))
    world.start().feed(job())
    for _ in range(24):
        world.wait(0.25)
    assert not world.sent(e.RecordEpisode)  # six seconds: the registry still lists it


def test_each_turn_draws_its_own_noise() -> None:
    world = World().start().feed(job(size=2, max_turns=3))
    seeds = [c.sampling.seed for c in world.sent(e.Generate)]
    assert len(seeds) == len(set(seeds)) == 6


def test_waiting_for_a_replica_is_recorded_as_hold() -> None:
    asked: list[str] = []

    def fail_once(command: e.Generate) -> e.RouterEvent:
        if command.episode.id not in asked:
            asked.append(command.episode.id)
            return failed(command, "busy")
        return generated(command)

    world = World().on(e.Generate, fail_once).start().feed(job())
    world.wait(5.0)
    states = [str(i.state) for i in world.sent(e.RecordTurn)[0].intervals]
    assert states == ["box_start", "hold", "queue", "prefill", "decode", "tool"]


# -- infrastructure ----------------------------------------------------------------------


def test_a_step_whose_result_is_lost_is_relaunched_as_a_new_attempt_never_repeated() -> None:
    lost: list[str] = []

    def lose_first(command: e.Exec) -> e.RouterEvent:
        if command.episode.attempt == 0:
            lost.append(command.episode.id)
            return e.StepFailed(command.episode, command.turn, "host away")
        return stepped(command)

    world = World().on(e.Exec, lose_first).start().feed(job())
    assert len(lost) == len(set(lost)) == 2
    assert [x.outcome for x in labels(world)].count(Outcome.INFRA_FAILURE) == 2
    assert {c.episode.attempt for c in world.sent(e.RecordEpisode)} == {0, 1}
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert (progress.repairs, progress.groups_complete) == (2, 1)


def test_repairs_are_bounded_and_then_the_sibling_is_final() -> None:
    world = World(repairs_max=2).on(
        e.AcquireBox, lambda c: e.BoxRefused(c.episode, c.host, "no image", retryable=False)
    )
    world.start().feed(job())
    assert len(world.sent(e.RecordEpisode)) == 2 * 3
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert progress.groups_complete == 1


def test_a_full_host_is_asked_again_later_within_the_bound() -> None:
    world = World(box_retries_max=1).on(
        e.AcquireBox, lambda c: e.BoxRefused(c.episode, c.host, "full", retryable=True)
    )
    world.start().feed(job())
    assert not world.sent(e.RecordEpisode)
    world.wait(10.0)
    assert labels(world)[0].cause == "box_start"


def test_an_attempt_tells_for_how_long_it_has_waited_for_its_box() -> None:
    world = World().on(
        e.AcquireBox, lambda c: e.BoxRefused(c.episode, c.host, "full", retryable=True)
    )
    world.start().feed(job(size=1))
    for _ in range(2):
        world.wait(10.0)
    assert [c.waited_s for c in world.sent(e.AcquireBox)] == [0.0, 10.0, 20.0]


def test_a_failed_replica_is_avoided_and_the_same_turn_asked_again_without_its_messages() -> None:
    def fail_r0(command: e.Generate) -> e.RouterEvent:
        if command.replica == "r0":
            return failed(command)
        return generated(command)

    world = World().on(e.Generate, fail_r0).start(replicas=2).feed(job())
    world.wait(1.0)
    again = [c for c in world.sent(e.Generate) if c.retry]
    assert again
    assert all(c.replica == "r1" and not c.messages and c.turn == 0 for c in again)
    assert all(x.outcome is Outcome.MODEL_SUCCESS for x in labels(world))


def test_waiting_for_a_replica_is_not_the_models_time() -> None:
    world = World(episode_timeout_s=50, hold_max_s=1000)
    world.feed(e.HostsListed((e.Host("h", "h:1"),)), e.RecoveryEnded(), job(max_turns=2))
    for _ in range(100):
        world.wait(1.0)
    world.feed(e.ReplicasListed((e.Replica("r", "r:1"),))).wait(1.0)
    assert {(x.outcome, x.cause) for x in labels(world)} == {(Outcome.MODEL_SUCCESS, "passed")}


def test_a_box_that_comes_after_its_episode_ended_is_given_back() -> None:
    world = World().on(e.AcquireBox, silent).start().feed(job())
    asked = world.sent(e.AcquireBox)[0]
    world.feed(e.JobCancelled("j"))
    world.feed(e.BoxAcquired(asked.episode, asked.host, "late", 0.0, 1.0))
    assert [c.box for c in world.sent(e.ReleaseBox)] == ["late"]


# -- admission and fates -----------------------------------------------------------------


def test_at_lag_0_the_next_batch_opens_only_when_the_version_is_published() -> None:
    world = World(groups_per_batch=2).start().feed(job(groups=6))
    assert len(world.sent(e.OpenGroup)) == 2
    world.feed(e.BatchTrained(1), *(e.FateRecorded(f"j-0000{i}", Fate.TRAINED) for i in (0, 1)))
    assert len(world.sent(e.OpenGroup)) == 2
    world.feed(e.VersionPublished(1, 1))
    assert len(world.sent(e.OpenGroup)) == 4


def test_a_fate_told_before_its_batch_frees_no_slot_at_lag_0() -> None:
    world = World(groups_per_batch=2).start().feed(job(groups=6))
    world.feed(
        e.FateRecorded("j-00000", Fate.TRAINED, 1), e.FateRecorded("j-00001", Fate.TRAINED, 1)
    )
    assert len(world.sent(e.OpenGroup)) == 2
    world.feed(e.BatchTrained(1), e.VersionPublished(1, 1))
    assert len(world.sent(e.OpenGroup)) == 4


def test_a_filtered_group_frees_its_slot_at_lag_0() -> None:
    world = World(groups_per_batch=2).start().feed(job(groups=6))
    world.feed(e.FateRecorded("j-00001", Fate.FILTERED))
    assert len(world.sent(e.OpenGroup)) == 3


def test_a_filtered_group_is_replaced_so_that_the_job_trains_what_was_asked_for() -> None:
    world = World(groups_per_batch=4).start().feed(job(groups=2))
    world.feed(e.FateRecorded("j-00001", Fate.FILTERED), e.FateRecorded("j-00000", Fate.TRAINED))
    assert [c.group for c in world.sent(e.OpenGroup)] == ["j-00000", "j-00001", "j-00002"]
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert str(progress.state) == "running"
    world.feed(e.FateRecorded("j-00002", Fate.TRAINED))
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert (str(progress.state), progress.groups_trained) == ("done", 2)


def test_replacements_are_bounded_so_that_a_hopeless_job_ends() -> None:
    world = World(groups_per_batch=4).start().feed(job(groups=1))
    world.feed(e.FateRecorded("j-00000", Fate.FILTERED), e.FateRecorded("j-00001", Fate.FILTERED))
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert (str(progress.state), progress.groups_filtered) == ("done", 2)


def test_lag_allows_whole_batches_ahead() -> None:
    world = World(groups_per_batch=2, lag_max=1).start().feed(job(groups=9))
    assert len(world.sent(e.OpenGroup)) == 4


def test_no_sibling_runs_before_its_group_is_durable() -> None:
    world = World().on(e.OpenGroup, silent).start().feed(job())
    assert not world.sent(e.AcquireBox)


def test_episodes_at_once_are_bounded() -> None:
    world = World(episodes_max=3, groups_per_batch=9).on(e.Generate, silent).start()
    world.feed(job(groups=4))
    assert len(world.sent(e.AcquireBox)) == 3


def test_a_cancelled_jobs_boxes_no_longer_weigh_on_their_hosts() -> None:
    world = World(groups_per_batch=9).on(e.Generate, silent).start(hosts=2).feed(job(size=3))
    world.feed(e.JobCancelled("j"), e.FateRecorded("j-00000", Fate.FILTERED))
    world.feed(job("k", size=2))
    assert [c.host for c in world.sent(e.AcquireBox)[3:]] == ["h0", "h1"]


def test_a_rest_that_cannot_fill_a_batch_says_so() -> None:
    world = World(groups_per_batch=4).start().feed(job(groups=3))
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert progress.waiting_for.startswith("more groups: 3 are complete, a batch takes 4")


def test_after_a_rollback_the_bound_counts_steps_and_not_version_numbers() -> None:
    world = World(groups_per_batch=1).start()
    world.feed(e.VersionPublished(5, 3), e.BatchTrained(3), job(groups=9))
    assert len(world.sent(e.OpenGroup)) == 1


def test_cancelling_stops_what_runs_and_opens_nothing_more() -> None:
    world = World(groups_per_batch=1).on(e.Generate, silent).start().feed(job(groups=3))
    world.feed(e.JobCancelled("j"), e.FateRecorded("j-00000", Fate.FILTERED))
    assert len(world.sent(e.AbortGenerate)) == len(world.sent(e.ReleaseBox)) == 2
    assert len(world.sent(e.OpenGroup)) == 1
    assert not world.sent(e.RecordEpisode)


# -- restart -----------------------------------------------------------------------------


def test_a_restarted_router_runs_only_what_is_not_final() -> None:
    final = OutcomeLabel(Outcome.MODEL_FAILURE, "not_passed", reward=0.0)
    world = World()
    world.feed(
        job(groups=1),
        e.GroupRestored("j-00000", "j", 0, (e.SiblingRestored(0, final, 1), e.SiblingRestored(1))),
    )
    assert not world.log
    world.start()
    assert [(c.episode.sibling, c.episode.attempt) for c in world.sent(e.AcquireBox)] == [(1, 1)]
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert (progress.groups_opened, progress.groups_complete) == (1, 1)


def test_a_group_whose_fate_is_known_at_restart_is_not_run_again() -> None:
    world = World().feed(
        job(groups=1),
        e.FateRecorded("j-00000", Fate.TRAINED),
        e.BatchTrained(1),
        e.VersionPublished(1, 1),
        e.GroupRestored("j-00000", "j", 0, (e.SiblingRestored(0), e.SiblingRestored(0))),
    )
    world.start()
    assert not world.log
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert (str(progress.state), progress.groups_trained) == ("done", 1)


def test_a_group_whose_opening_was_lost_with_its_router_is_opened_by_the_next() -> None:
    world = World(groups_per_batch=9).feed(
        job(groups=3), e.GroupRestored("j-00001", "j", 1, (e.SiblingRestored(0),) * 2)
    )
    world.start()
    assert sorted(c.group for c in world.sent(e.OpenGroup)) == ["j-00000", "j-00002"]


def test_equal_events_give_equal_decisions_and_seeds_differ_per_attempt() -> None:
    def lose_one(command: e.Exec) -> e.RouterEvent:
        if command.episode.attempt or command.episode.sibling:
            return stepped(command)
        return e.StepFailed(command.episode, command.turn, "host away")

    one, two = World(), World()
    for world in (one, two):
        world.on(e.Exec, lose_one).start().feed(job(groups=2, size=3))
    assert msgspec.json.encode(one.log) == msgspec.json.encode(two.log)
    seeds = [c.sampling.seed for c in one.sent(e.Generate)]
    assert len(set(seeds)) == len(seeds) == 2 * 3 + 2


def test_rules_travel_as_data() -> None:
    rules = World(lag_max=3).machine.rules
    back = msgspec.json.decode(msgspec.json.encode(rules), type=RouterMachine.rules_type)
    assert back == rules


def test_a_command_cut_by_the_token_limit_does_not_run() -> None:
    cut = BLOCK.removesuffix("\n```")
    world = World(unparseable_max=1).on(
        e.Generate, lambda c: generated(c, cut, finish=FinishReason.LENGTH)
    )
    world.on(e.Verify, lambda c: verdict(c, 0.0)).start().feed(job())
    assert not world.sent(e.Exec)
