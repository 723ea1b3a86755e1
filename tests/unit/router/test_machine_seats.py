"""The router's machine on replicas that grant credits: holding, moving, losing them."""

from __future__ import annotations

import pytest

from muster.types import FinishReason, Outcome
from services.router import events as e
from services.router.machine import RouterMachine
from tests.unit.router.granted import Fleet, held, told
from tests.unit.router.test_machine import labels, silent
from tests.unit.router.world import World, failed, generated, job, stepped

# -- holding -------------------------------------------------------------------------------


def test_a_turn_that_does_not_fit_is_held_at_its_boundary_after_it_was_recorded() -> None:
    world = held()
    assert (world.turns(0), world.turns(1)) == (2, 1)
    assert len([c for c in world.sent(e.RecordTurn) if c.episode.sibling == 1]) == 1


def test_it_goes_on_in_the_very_step_in_which_the_other_one_stops_sampling() -> None:
    world = held().on(e.Verify, silent)
    world.reply(0, 620, "DONE")
    assert isinstance(world.log[-1], e.Generate)
    assert (world.log[-1].episode.sibling, world.log[-1].turn) == (1, 1)


def test_time_held_for_kv_is_no_wait_for_a_replica_and_is_recorded_as_hold() -> None:
    world = Fleet(hold_max_s=5.0).feed(job(size=2, max_turns=2))
    world.reply(0, 600)
    world.reply(1, 400)
    for _ in range(30):
        world.feed(told()).wait(1.0)
    assert not world.sent(e.RecordEpisode)
    world.reply(0, 620)
    world.reply(1, 410, start_unix_s=50.0, end_unix_s=51.0)
    turn = [c for c in world.sent(e.RecordTurn) if c.episode.sibling == 1][-1]
    assert "hold" in [str(i.state) for i in turn.intervals]
    assert [x.outcome for x in labels(world)] == [Outcome.MODEL_SUCCESS] * 2


def test_after_a_hold_for_kv_the_wait_for_any_replica_begins_anew() -> None:
    world = Fleet(hold_max_s=5.0, repairs_max=0).feed(job(size=2, max_turns=9))
    world.reply(1, 400)
    world.reply(0, 600)
    world.feed(failed(world.asked(1)[-1], full=True)).wait(1.0)  # now it does not fit
    assert len(world.asked(1)) == 2
    for _ in range(9):
        world.feed(told()).wait(1.0)
    world.reply(0, 620, "DONE")
    world.feed(failed(world.asked(1)[-1], full=True))
    assert [x.outcome for x in labels(world)] == [Outcome.MODEL_SUCCESS]


def test_an_observation_counts_before_it_is_prefilled() -> None:
    world = Fleet().on(e.Exec, lambda c: stepped(c, output_tokens=80))
    world.feed(job(size=2, max_turns=9))
    world.reply(0, 520)
    world.reply(1, 300)  # 380 with what it observed, beside 600: too much
    assert world.turns(1) == 1


def test_nothing_is_launched_where_one_is_held() -> None:
    world = held()
    before = len(world.sent(e.AcquireBox))
    world.feed(job("k", size=2, groups=1))
    assert len(world.sent(e.AcquireBox)) == before


def test_one_that_was_held_for_too_long_goes_first() -> None:
    world = Fleet(fair_hold_s=20.0).feed(job(size=2, max_turns=9))
    world.reply(0, 600)
    world.reply(1, 400)
    for _ in range(21):
        world.feed(told()).wait(1.0)
    assert world.turns(1) == 2


def test_a_cancelled_job_frees_its_seats() -> None:
    world = held()
    world.feed(e.JobCancelled("j"))
    assert not list(world.machine._fleet.seats.programs())
    assert not world.machine._fleet.loads.asked


# -- credits -------------------------------------------------------------------------------


def test_no_turn_is_asked_for_before_a_replica_has_granted_and_was_proven() -> None:
    world = World(placement="predicted_finish", admission="kv_fit", probes=True)
    world.on(e.ProbeReplica, silent).start().feed(job())
    assert not world.sent(e.AcquireBox)
    world.feed(told())
    assert [c.life for c in world.sent(e.ProbeReplica)] == ["first"]
    assert not world.sent(e.AcquireBox)
    world.feed(e.ReplicaProbed("r0", "first", passed=True))
    assert len(world.sent(e.AcquireBox)) == 2


def test_with_an_ended_credit_running_turns_end_and_nothing_new_begins() -> None:
    world = Fleet().feed(job(size=2, max_turns=9))
    world.wait(30.0)
    world.reply(0, 100)
    assert len(world.sent(e.RecordTurn)) == 1
    assert world.turns(0) == 1
    world.feed(told())
    assert world.turns(0) == 2


def test_a_launch_takes_the_room_that_a_young_one_will_need() -> None:
    world = Fleet(reserve_tokens=300).feed(job(size=8))
    assert len(world.sent(e.AcquireBox)) == 3
    world.reply(2, 120, "DONE")
    assert len(world.sent(e.AcquireBox)) == 4


# -- where a turn goes ---------------------------------------------------------------------


def test_each_request_says_why_it_goes_there_what_it_costs_and_what_is_cached() -> None:
    world = Fleet().feed(job(size=1, max_turns=9))
    world.reply(0, 64, boundary=77, boundary_tokens=64)
    first, second = world.asked(0)
    assert (first.why, second.why, first.cached, second.cached) == ("launched", "seat", 0, 64)
    assert list(second.terms) == ["r0"]
    assert second.terms["r0"] > 0


def test_siblings_know_the_prompt_that_the_first_of_them_left() -> None:
    world = Fleet()
    prompt = e.GroupRecorded
    world.on(e.OpenGroup, lambda c: prompt(c.group, prompt_tokens=40, prompt_blocks=(5, 6)))
    world.feed(job(size=2))
    assert [c.cached for c in world.sent(e.Generate)] == [0, 32]


@pytest.mark.parametrize("news", ["published", "told", "seen"])
def test_new_weights_empty_the_cache(news: str) -> None:
    world = Fleet().on(e.Exec, silent).feed(job(size=1, max_turns=9))
    newer = {"version": 1} if news == "seen" else {}
    world.reply(0, 64, boundary=77, boundary_tokens=64, **newer)
    if news == "published":
        world.feed(e.VersionPublished(1, 1))
    elif news == "told":
        world.feed(told(version=1))
    assert world.machine._fleet.seats.kept(world.asked(0)[0].episode.id) == 64 * (news == "seen")
    world.feed(*(stepped(c) for c in world.sent(e.Exec)))
    assert world.asked(0)[-1].cached == 0


def test_equal_versions_empty_nothing() -> None:
    world = Fleet().on(e.Exec, silent).feed(job(size=1, max_turns=9))
    world.reply(0, 64, boundary=77, boundary_tokens=64)
    world.feed(e.VersionPublished(0, 3), told())
    world.feed(*(stepped(c) for c in world.sent(e.Exec)))
    assert world.asked(0)[-1].cached == 64


def test_a_large_dead_cache_is_stepped_behind_the_caches_of_those_at_their_tools() -> None:
    world = Fleet().on(e.Exec, lambda c: stepped(c) if c.episode.sibling != 1 else None)
    world.feed(job(size=3, max_turns=9))
    world.reply(1, 100)
    world.reply(0, 300)
    world.reply(0, 310, "DONE")
    [touch] = world.sent(e.Touch)
    assert (touch.episode.sibling, touch.replica) == (1, "r0")


@pytest.mark.parametrize("admission", ["none", "pressure", "hold_resume"])
def test_other_rules_touch_nothing_and_hold_what_they_say(admission: str) -> None:
    world = Fleet(admission=admission).feed(job(size=2, max_turns=9))
    world.reply(0, 850)
    world.reply(1, 400)
    assert world.turns(1) == (1 if admission == "hold_resume" else 2)
    world.reply(0, 860, "DONE")
    assert world.turns(1) == 2
    assert not world.sent(e.Touch)


def test_a_policy_that_knows_no_seats_moves_a_conversation_and_its_seat() -> None:
    world = Fleet(2, placement="round_robin").feed(job(size=1, max_turns=9))
    for tokens in (100, 200, 300):
        world.reply(0, tokens)
    replicas = [c.replica for c in world.asked(0)]
    assert set(replicas) == {"r0", "r1"}
    assert world.machine._fleet.seats.home(world.asked(0)[0].episode.id) == replicas[-1]


# -- lost replicas -------------------------------------------------------------------------


def lost(world: Fleet, how: str) -> None:
    match how:
        case "another life":
            world.feed(told("r0", life="second"))
        case "serves nothing":
            world.feed(told("r0", serving=False, credit_tokens=0))
        case "wedged":
            for _ in range(4):
                world.wait(10.0)
                world.feed(told("r1", steps=int(world.now)), told("r0", running=1, steps=5))


@pytest.mark.parametrize("how", ["another life", "serves nothing", "wedged"])
def test_what_ran_on_a_lost_replica_is_aborted_and_asked_for_elsewhere(how: str) -> None:
    world = Fleet(2).on(e.ProbeReplica, silent).feed(job(size=2, max_turns=9))
    asked = {c.replica: c for c in world.sent(e.Generate)}
    assert set(asked) == {"r0", "r1"}
    world.feed(told("r0", running=1, steps=5))
    lost(world, how)
    [abort] = world.sent(e.AbortGenerate)
    again = world.sent(e.Generate)[-1]
    first = asked["r0"]
    assert (abort.episode, abort.replica, abort.retry) == (first.episode, "r0", 0)
    assert (again.episode, again.replica, again.turn) == (first.episode, "r1", first.turn)
    assert (again.retry, again.messages) == (1, ())
    assert world.log.index(abort) < world.log.index(again)


def test_the_late_answer_of_a_lost_replica_is_dropped() -> None:
    world = Fleet(2).on(e.ProbeReplica, silent).feed(job(size=1, max_turns=9))
    first = world.sent(e.Generate)[0]
    world.feed(told(first.replica, life="second"))
    world.feed(generated(first, "DONE"), failed(first))
    assert not world.sent(e.RecordTurn)
    assert len(world.sent(e.Generate)) == 2
    world.reply(0, 100, "DONE")
    assert len(world.sent(e.RecordTurn)) == 1


def test_without_another_replica_it_waits_and_is_asked_for_when_one_is_well() -> None:
    world = Fleet().on(e.ProbeReplica, silent).feed(job(size=1, max_turns=9))
    world.feed(told(life="second")).wait(1.0)
    assert len(world.asked(0)) == 1
    world.feed(e.ReplicaProbed("r0", "second", passed=True)).wait(1.0)
    again = world.asked(0)[-1]
    assert (again.retry, again.messages, again.cached) == (1, (), 0)


def test_one_that_was_held_on_a_lost_replica_goes_on_elsewhere_at_once() -> None:
    world = held()
    world.feed(e.ReplicasListed((e.Replica("r0", "a"), e.Replica("r1", "b"))), told("r1"))
    world.on(e.ProbeReplica, silent)
    world.wait(6.0).feed(told(life="second"))
    replicas = [c.replica for c in world.sent(e.Generate) if c.turn == 1]
    assert replicas[-2:] == ["r1", "r1"]


def test_a_replica_that_is_no_longer_listed_keeps_its_turns_while_its_credit_runs() -> None:
    world = Fleet(2).feed(job(size=2, max_turns=9))
    first = next(c for c in world.sent(e.Generate) if c.replica == "r0")
    world.feed(e.ReplicasListed((e.Replica("r1", "r1:1"),)))
    assert not world.sent(e.AbortGenerate)
    world.wait(29.0).feed(told("r1"))
    world.wait(2.0)
    assert [c.episode for c in world.sent(e.AbortGenerate)] == [first.episode]
    assert world.sent(e.Generate)[-1].replica == "r1"


def test_one_that_is_listed_again_meanwhile_has_kept_its_conversations() -> None:
    world = Fleet(2).on(e.Exec, silent).feed(job(size=1, max_turns=9))
    world.reply(0, 64, boundary=77, boundary_tokens=64)
    world.feed(e.ReplicasListed((e.Replica("r1", "b"),))).wait(1.0)
    world.feed(e.ReplicasListed((e.Replica("r0", "a"), e.Replica("r1", "b"))))
    world.feed(*(stepped(c) for c in world.sent(e.Exec)))
    first, second = world.asked(0)
    assert (second.replica, second.cached) == (first.replica, 64)


# -- replay --------------------------------------------------------------------------------


def test_a_journal_of_events_replays_to_equal_commands() -> None:
    class Journalled(RouterMachine):
        def handle(self, event: e.RouterEvent, now: float) -> list[e.RouterCommand]:
            commands = super().handle(event, now)
            journal.append((event, now, commands))
            return commands

    journal: list[tuple[e.RouterEvent, float, list[e.RouterCommand]]] = []
    world = Fleet(2)
    world.machine = Journalled(world.machine.rules)
    world.start(replicas=2).feed(told("r0"), told("r1"), job(size=8, groups=2, max_turns=9))
    for sibling in range(8):
        world.reply(sibling, 100 + 50 * sibling, finish=FinishReason.STOP)
    world.feed(told("r0", life="second")).wait(1.0)
    again = RouterMachine(world.machine.rules)
    for event, now, commands in journal:
        again.explain("", now, now, "logs")  # a question changes nothing
        again.progress("j", now)
        assert again.handle(event, now) == commands


def test_after_a_restart_an_opening_counts_before_anything_of_its_group_was_recorded() -> None:
    world = World(placement="predicted_finish", admission="kv_fit", probes=True, reserve_tokens=10)
    siblings = (e.SiblingRestored(0), e.SiblingRestored(0))
    world.on(e.AcquireBox, silent)
    world.feed(job(), e.GroupRestored("j-00000", "j", 0, siblings, 400, (5, 6)))
    world.start().feed(told()).wait(1.0)
    programs = world.machine._fleet.seats.programs()
    assert [program.context for program in programs] == [400, 400]


def test_a_credit_counts_no_longer_than_is_configured() -> None:
    world = Fleet(credit_ttl_max_s=20.0, fair_hold_s=1e6)
    world.feed(told(ttl_s=1e9)).wait(21.0).feed(job(size=1))
    assert not world.sent(e.AcquireBox)
