"""The router's machine at its edges: one test per decision that nothing else pins."""

from __future__ import annotations

import msgspec

from muster.types import Fate, Outcome
from services.router import events as e
from tests.unit.router.test_machine import labels, silent
from tests.unit.router.test_machine_hard import busy
from tests.unit.router.world import BLOCK, World, failed, generated, job, stepped, verdict


def failing_job(world: World) -> World:
    return world.on(e.Verify, lambda c: verdict(c, 0.0))


def test_a_late_box_of_a_cancelled_episode_frees_its_hosts_place() -> None:
    world = World().on(e.AcquireBox, silent).start().feed(job())
    asked = world.sent(e.AcquireBox)
    world.feed(e.JobCancelled("j"))
    world.feed(*(e.BoxAcquired(c.episode, c.host, f"b{c.episode.sibling}", 0, 1) for c in asked))
    assert busy(world) == (0, 0, 0)


def test_an_end_that_was_not_asked_for_ends_nothing() -> None:
    world = World().on(e.Exec, silent).start().feed(job())
    world.feed(*(e.EpisodeRecorded(c.episode) for c in world.sent(e.Exec)))
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert (progress.episodes_running, progress.episodes_finished) == (2, 0)


def test_an_answer_to_another_owners_attempt_is_dropped() -> None:
    world = World().on(e.Generate, silent).start().feed(job())
    other = msgspec.structs.replace(world.sent(e.Generate)[0].episode, owner_epoch=6)
    asked = msgspec.structs.replace(world.sent(e.Generate)[0], episode=other)
    world.feed(generated(asked))
    assert not world.sent(e.Exec)


def test_siblings_that_wait_when_their_job_is_cancelled_never_run() -> None:
    world = World(episodes_max=1).on(e.Generate, silent).start().feed(job(size=3))
    world.feed(e.JobCancelled("j")).wait(1.0)
    assert len(world.sent(e.AcquireBox)) == 1


def test_versions_and_steps_never_go_back() -> None:
    world = World(groups_per_batch=1).start().feed(job(groups=9))
    for step in (1, 2):
        world.feed(e.FateRecorded(f"j-0000{step - 1}", Fate.TRAINED, step), e.BatchTrained(step))
        world.feed(e.VersionPublished(step, step))
    opened = len(world.sent(e.OpenGroup))
    world.feed(e.VersionPublished(1, 1), e.BatchTrained(1))
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert (progress.policy_version, len(world.sent(e.OpenGroup))) == (2, opened)


def test_a_fate_ends_what_still_runs_of_its_group() -> None:
    world = World().on(e.Generate, silent).start().feed(job())
    world.feed(e.FateRecorded("j-00000", Fate.FILTERED))
    aborted = {c.episode.group for c in world.sent(e.AbortGenerate)}
    assert aborted == {"j-00000"}
    assert len(world.sent(e.ReleaseBox)) == 2


def test_a_job_that_is_done_cannot_be_cancelled() -> None:
    world = World().start().feed(job(), e.FateRecorded("j-00000", Fate.TRAINED, 1))
    world.feed(e.JobCancelled("j"))
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert str(progress.state) == "done"


def test_a_replica_that_comes_late_leaves_the_model_its_whole_time() -> None:
    world = World(episode_timeout_s=50, hold_max_s=1000).on(e.Generate, silent)
    world.feed(e.HostsListed((e.Host("h", "h:1"),)), e.RecoveryEnded(), job())
    world.wait(100.0).feed(e.ReplicasListed((e.Replica("r", "r:1"),)))
    world.wait(1.0).wait(48.0)
    assert world.sent(e.Generate)
    assert not world.sent(e.AbortGenerate)


def test_no_replica_for_too_long_is_infrastructure() -> None:
    world = World(hold_max_s=5, repairs_max=0)
    world.feed(e.HostsListed((e.Host("h", "h:1"),)), e.RecoveryEnded(), job())
    world.wait(4.0)
    assert not labels(world)
    world.wait(2.0)
    assert {(x.outcome, x.cause) for x in labels(world)} == {(Outcome.INFRA_FAILURE, "engine")}


def test_each_turn_has_its_own_retries() -> None:
    def first_fails(command: e.Generate) -> e.RouterEvent:
        if command.retry:
            return generated(command)
        return failed(command)

    world = World(generate_retries_max=1).on(e.Generate, first_fails).start().feed(job(max_turns=4))
    for _ in range(5):
        world.wait(1.0)
    assert [x.outcome for x in labels(world)] == [Outcome.MODEL_SUCCESS] * 2


def test_retries_do_not_count_while_no_replica_is_there() -> None:
    world = World(generate_retries_max=0).on(e.Generate, silent).start().feed(job())
    asked = world.sent(e.Generate)
    world.feed(e.ReplicasListed(()))
    world.feed(*(failed(c) for c in asked))
    assert not labels(world)


def test_a_tasks_own_time_limit_counts_when_it_is_shorter() -> None:
    submitted = job()
    task = msgspec.structs.replace(submitted.job.tasks[0], episode_timeout_s=5.0)
    spec = msgspec.structs.replace(submitted.job, tasks=(task,))
    world = World(episode_timeout_s=50).start().feed(e.JobSubmitted(spec))
    assert {c.timeout_s for c in world.sent(e.Exec)} == {4.0}


def test_the_token_budget_bounds_each_reply_and_ends_the_episode() -> None:
    world = failing_job(World(episode_tokens_max=8)).start().feed(job(max_turns=9))
    mine = [c for c in world.sent(e.Generate) if c.episode.sibling == 0]
    assert [c.max_tokens for c in mine] == [8, 3]
    assert {x.cause for x in labels(world)} == {"budget_tokens"}


def test_a_need_of_network_is_not_asked_for_again() -> None:
    world = World(repairs_max=0).on(
        e.AcquireBox, lambda c: e.BoxRefused(c.episode, c.host, "net", True, network_need=True)
    )
    world.start().feed(job())
    assert {x.cause for x in labels(world)} == {"network_need"}


def test_a_host_that_refused_is_avoided_for_a_while() -> None:
    def h0_is_full(command: e.AcquireBox) -> e.RouterEvent:
        if command.host == "h0":
            return e.BoxRefused(command.episode, "h0", "full", retryable=True)
        return e.BoxAcquired(command.episode, command.host, "box", 0.0, 0.5)

    world = World().on(e.AcquireBox, h0_is_full).on(e.Generate, silent)
    world.start(hosts=2).feed(job(size=4)).wait(1.0)
    assert {c.host for c in world.sent(e.AcquireBox)[-2:]} == {"h1"}
    assert busy(world)[0] == 4


def test_boxes_are_spread_over_hosts() -> None:
    world = World().on(e.Generate, silent).start(hosts=2).feed(job(size=4))
    hosts = [c.host for c in world.sent(e.AcquireBox)]
    assert (hosts.count("h0"), hosts.count("h1")) == (2, 2)


def test_requests_are_spread_over_replicas_and_forgotten_with_them() -> None:
    world = World().on(e.Generate, silent).start(replicas=2).feed(job(size=4))
    used = [c.replica for c in world.sent(e.Generate)]
    assert (used.count("r0"), used.count("r1")) == (2, 2)
    world.feed(e.ReplicasListed(()))
    assert busy(world)[1:] == (0, 0)


def test_a_command_in_between_forgives_unparseable_replies() -> None:
    texts = ["hmm", BLOCK, "hmm", "DONE"]
    world = World(unparseable_max=2).on(e.Generate, lambda c: generated(c, texts[c.turn]))
    world.start().feed(job(max_turns=9))
    assert {x.cause for x in labels(world)} == {"passed"}


def test_a_full_context_is_the_models_failure() -> None:
    world = World().on(e.Generate, lambda c: e.ContextFull(c.episode, c.turn)).start().feed(job())
    assert {(x.outcome, x.cause) for x in labels(world)} == {(Outcome.MODEL_FAILURE, "context")}


def test_cpu_time_of_all_steps_is_summed() -> None:
    world = World().on(e.Exec, lambda c: stepped(c, cpu_s=1.5)).start().feed(job(max_turns=3))
    assert {x.cpu_s for x in labels(world)} == {4.5}


def test_replacements_are_at_most_one_per_group_wanted() -> None:
    world = World(groups_per_batch=4).start().feed(job(groups=2))
    for index in range(6):
        world.feed(e.FateRecorded(f"j-0000{index}", Fate.FILTERED))
    assert len(world.sent(e.OpenGroup)) == 4


def test_a_lost_opening_is_opened_once() -> None:
    world = (
        World(groups_per_batch=9)
        .on(e.Generate, silent)
        .feed(job(groups=4), e.GroupRestored("j-00002", "j", 2, (e.SiblingRestored(0),) * 2))
    )
    world.start()
    assert sorted(c.group for c in world.sent(e.OpenGroup)) == [f"j-0000{i}" for i in (0, 1, 3)]


def boxed(world: World) -> list[str]:
    """Groups whose boxes were asked for, in that order."""
    return [c.episode.group for c in world.sent(e.AcquireBox)]


def test_groups_whose_records_are_answered_out_of_order_are_launched_in_order() -> None:
    """The whole job is opened at once, and its last records may be the first to be durable."""
    world = World(groups_per_batch=9, episodes_max=1).on(e.OpenGroup, silent).start()
    world.on(e.Generate, silent).feed(job(groups=5, size=1))
    asked = [c.group for c in world.sent(e.OpenGroup)]
    world.feed(*(e.GroupRecorded(group) for group in (asked[0], *reversed(asked[1:]))))
    while len(waiting := boxed(world)) < 5:
        world.feed(generated(world.sent(e.Generate)[-1], "DONE"))
        assert len(boxed(world)) == len(waiting) + 1
    assert boxed(world) == asked


def test_groups_that_a_restart_tells_out_of_order_are_launched_in_order() -> None:
    told = [e.GroupRestored(f"j-0000{n}", "j", n, (e.SiblingRestored(0),)) for n in (2, 0, 1)]
    world = World(groups_per_batch=9).on(e.Generate, silent)
    world.feed(job("i", groups=1, size=1), job(groups=3, size=1), *told)
    world.feed(e.GroupRestored("i-00000", "i", 0, (e.SiblingRestored(0),))).start()
    assert boxed(world) == ["i-00000", "j-00000", "j-00001", "j-00002"]
