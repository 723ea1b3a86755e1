"""Homes that take no turn: what waits there waits for a while, then goes on elsewhere or ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.router import events as e
from tests.unit.router.granted import Fleet, told
from tests.unit.router.hall import Hall
from tests.unit.router.test_machine import silent
from tests.unit.router.test_resume import turn
from tests.unit.router.world import Answer, World, default, generated, job, stepped, verdict

Tell = Callable[[], e.RouterEvent]
BOTH = (e.Replica("r0", "r0:1"), e.Replica("r1", "r1:1"))
HOST = e.HostsListed((e.Host("h0", "h0:1"),))


def only_r0_passes(command: e.ProbeReplica) -> e.ReplicaProbed:
    return e.ReplicaProbed(command.replica, command.life, command.replica == "r0", "wedged")


def taken_over(
    count: int, tokens: int, credit: int, *, probe: Answer = default, **rules: object
) -> World:
    """A former router's siblings, all of whose KV lies at r1; nothing is recovered yet."""
    given: dict = {"placement": "predicted_finish", "admission": "kv_fit"} | rules
    world = World(
        probes=True,
        prefix_block_tokens=16,
        turns_max=9,
        context_tokens_max=200_000,
        episode_tokens_max=100_000,
        **given,
    )
    world.on(e.Generate, silent).on(e.ProbeReplica, probe).feed(job(size=count, max_turns=9))
    former = (turn(0, prompt_tokens=tokens, replica="r1"),)
    siblings = tuple(
        e.SiblingRestored(0, resume=e.Resume(former, host="h0", box=f"old{n}"))
        for n in range(count)
    )
    world.feed(e.GroupRestored("j-00000", "j", 0, siblings), e.ReplicasListed(BOTH))
    return world.feed(*(told(f"r{n}", credit_tokens=credit) for n in range(2)))


def pass_time(world: World, seconds: int, credit: int, r1: Tell) -> None:
    for _ in range(seconds // 5):
        world.now += 5
        world.feed(told("r0", credit_tokens=credit), r1(), e.Tick())


@pytest.mark.parametrize("admission", ["kv_fit", "hold_resume", "pressure"])
@pytest.mark.parametrize(
    "r1",
    [
        lambda: told("r1", credit_tokens=100_000),
        lambda: told("r1", serving=False, credit_tokens=0),
        lambda: e.ReplicaSilent("r1", "no answer"),
    ],
    ids=["its probe fails", "it serves nothing", "it is silent"],
)
def test_after_a_takeover_nobody_waits_for_ever_for_a_home_that_is_never_well(
    admission: str, r1: Tell
) -> None:
    world = taken_over(2, 60_000, 100_000, probe=only_r0_passes, admission=admission)
    world.feed(HOST, e.RecoveryEnded())
    pass_time(world, 60, 100_000, r1)
    first = world.sent(e.Generate)[0]
    assert first.replica == "r0"
    world.feed(generated(first, "DONE", prompt_tokens=60_000))
    pass_time(world, 10, 100_000, r1)
    assert {c.episode.sibling for c in world.sent(e.Generate)} == {0, 1}


def test_while_it_is_held_for_its_home_people_are_told_why_that_takes_no_turn() -> None:
    world = taken_over(1, 60_000, 100_000, probe=only_r0_passes)
    world.feed(HOST, e.RecoveryEnded())
    pass_time(world, 10, 100_000, lambda: told("r1", credit_tokens=100_000))
    said = world.machine.explain("j-00000.0.0", world.now, world.now, "logs")[0].waits_for
    assert "r1, its home, which takes no turn now (r1 is probed again" in said
    assert "wedged" in said


def test_a_replica_that_grants_nothing_any_more_keeps_nobody_for_ever() -> None:
    world = Fleet(replicas=2).on(e.Exec, silent)
    world.feed(*(told(f"r{n}", credit_tokens=500_000) for n in range(2)))
    world.feed(job(size=2, max_turns=9))
    for sibling in (0, 1):
        world.reply(sibling, 60_000)
    world.feed(told("r1", credit_tokens=0))
    world.feed(*(stepped(c) for c in world.sent(e.Exec)))
    assert [c.replica for c in world.asked(1)] == ["r1"]
    pass_time(world, 25, 500_000, lambda: told("r1", credit_tokens=0))
    assert [c.replica for c in world.asked(1)] == ["r1"]
    pass_time(world, 15, 500_000, lambda: told("r1", credit_tokens=0))
    assert [c.replica for c in world.asked(1)] == ["r1", "r0"]
    assert world.sent(e.AbortGenerate) == []


def test_where_no_replica_takes_turns_any_more_the_wait_is_bounded_and_its_reason_told() -> None:
    world = Fleet(replicas=1, hold_max_s=100.0, repairs_max=0).on(e.Exec, silent)
    world.feed(told("r0", credit_tokens=500_000), job(size=1, max_turns=9))
    world.reply(0, 60_000)
    world.feed(told("r0", credit_tokens=0), stepped(world.sent(e.Exec)[0]))
    for _ in range(40):
        world.now += 1
        world.feed(told("r0", credit_tokens=0), e.Tick())
    said = world.said("j-00000.0.0")[-1].waits_for
    assert "r0 grants no room in its KV cache" in said
    for _ in range(120):
        world.now += 1
        world.feed(told("r0", credit_tokens=0), e.Tick())
    assert [c.label.cause for c in world.sent(e.RecordEpisode)] == ["engine"]


@pytest.mark.parametrize("first", ["r0", "r1"])
def test_after_a_takeover_a_conversation_waits_for_its_home_to_be_proven(first: str) -> None:
    world = taken_over(1, 60_000, 500_000, probe=silent)
    probes = {c.replica: c for c in world.sent(e.ProbeReplica)}
    other = "r1" if first == "r0" else "r0"
    world.feed(e.ReplicaProbed(first, probes[first].life, True), HOST, e.RecoveryEnded())
    world.now += 0.1
    world.feed(e.ReplicaProbed(other, probes[other].life, True))
    assert [(c.replica, c.cached) for c in world.sent(e.Generate)] == [("r1", 60_005)]


def test_a_credit_that_lapses_for_a_moment_moves_nobody() -> None:
    world = Fleet(replicas=2).on(e.Exec, silent)
    world.feed(*(told(f"r{n}", credit_tokens=500_000) for n in range(2)))
    world.feed(job(size=1, max_turns=9))
    world.reply(0, 60_000)
    assert world.asked(0)[-1].replica == "r0"
    world.now += 30  # the end of its credit
    world.feed(told("r1", credit_tokens=500_000), stepped(world.sent(e.Exec)[-1]))
    assert world.turns(0) == 1
    world.feed(told("r0", credit_tokens=500_000))
    assert world.asked(0)[-1].replica == "r0"


def test_what_a_former_router_left_in_a_cache_counts_when_homes_are_weighed() -> None:
    world = taken_over(2, 60_000, 500_000)
    world.feed(HOST, e.RecoveryEnded())
    assert [c.replica for c in world.sent(e.Generate)] == ["r1", "r1"]


def test_the_first_word_of_a_replica_empties_no_cache() -> None:
    world = taken_over(1, 60_000, 500_000, probe=silent)
    late = taken_over(1, 60_000, 500_000, probe=silent)
    late.machine._fleet.loads.loads["r1"].version = -1  # as before it was told of
    for one in (world, late):
        one.feed(HOST, e.RecoveryEnded(), told("r1", credit_tokens=500_000))
        assert one.machine._fleet.seats.kept("j-00000.0.0") == 60_005


def test_the_wait_of_a_held_one_goes_on_when_its_home_is_lost() -> None:
    hall = Hall("r", fair_hold_s=100.0)
    hall.fill(a=600, b=300)
    assert hall.turn("b", 400) == ""
    for number in range(2):
        hall.now += 40
        hall.seats.every(hall.now)
        hall.settled()
        home = hall.seats.home("a")
        hall.grant(f"s{number}")
        hall.seats.lost(home)
        for id_, context in (("a", 600), ("b", 400)):
            hall.seats.ready(id_, context, hall.now)
        hall.settled()
    assert hall.seats.holds("b")
    hall.now += 20
    hall.seats.every(hall.now)
    assert hall.settled() == ["b"]


def test_a_policy_that_knows_no_seats_leaves_a_request_where_it_runs() -> None:
    world = taken_over(1, 5000, 100_000, placement="sticky_least_loaded", resume_wait_s=0.0)
    world.feed(e.ReplicasListed(BOTH[:1]))
    world.now += 31
    world.feed(told("r0", credit_tokens=100_000), e.Tick(), HOST, e.RecoveryEnded())
    world.wait(1.0)
    assert [c.replica for c in world.sent(e.Generate)] == ["r0"]
    world.feed(e.ReplicasListed(BOTH), told("r1", credit_tokens=100_000))
    assert world.machine._fleet.seats.home("j-00000.0.0") == "r0"


def test_a_turn_that_takes_one_engine_after_the_other_down_ends_the_attempt() -> None:
    world = Fleet(replicas=2, generate_retries_max=3, repairs_max=0)
    world.feed(job(size=1, max_turns=9))
    for _ in range(600):
        world.now += 1
        asked = world.sent(e.Generate)[-1].replica
        world.feed(*(told(r, running=int(r == asked), steps=7) for r in ("r0", "r1")), e.Tick())
    assert len(world.sent(e.Generate)) == len(world.sent(e.AbortGenerate)) == 4
    assert [c.label.cause for c in world.sent(e.RecordEpisode)] == ["engine"]


def test_the_only_replica_takes_new_conversations_however_slow_it_is() -> None:
    world = Fleet(replicas=2)
    health = world.machine._fleet.health
    for _ in range(9):
        health.answered("r0", 1.0, 10.0)
        health.answered("r1", 1.0, 1.0)
    world.feed(told("r0"), told("r1", running=1, steps=1), job(size=1, max_turns=9))
    assert world.asked(0)[-1].replica == "r1"
    world.feed(e.ReplicaSilent("r1", "no answer"))
    world.feed(job("k", size=1, max_turns=9))
    assert world.sent(e.AcquireBox)[-1].episode.group == "k-00000"


def slow_beside(credit: int) -> Fleet:
    """r0 is slow; r1 is not, and grants so much."""
    world = Fleet(replicas=2)
    for _ in range(9):
        world.machine._fleet.health.answered("r0", 1.0, 10.0)
        world.machine._fleet.health.answered("r1", 1.0, 1.0)
    world.feed(told("r0", running=1, steps=1), told("r1", running=1, steps=1, credit_tokens=credit))
    return world


def test_a_slow_replica_takes_nothing_new_while_another_does_and_people_are_told() -> None:
    world = slow_beside(150).feed(job(size=2, max_turns=9))
    assert len(world.sent(e.AcquireBox)) == 1  # r1 has room for one
    told_of = world.machine._fleet.why_no_room(world.now)
    assert "r0 is 10.0 times slower than the median, others come first" in told_of
    assert "r1: " in told_of


def test_one_that_grants_nothing_does_not_keep_new_ones_from_a_slow_one() -> None:
    world = slow_beside(0).feed(job(size=2, max_turns=9))
    assert len(world.sent(e.AcquireBox)) == 2


def test_groups_that_are_not_complete_are_not_told_to_be() -> None:
    world = taken_over(1, 500, 100_000)
    world.feed(e.HostsListed((e.Host("h9", "h9:1"),)), e.RecoveryEnded())
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert "complete" not in progress.waiting_for


def test_a_replica_that_starts_over_and_over_stops_no_launch() -> None:
    world = Fleet(replicas=1).on(e.ProbeReplica, silent)
    for number in range(5):
        world.now += 4
        both = (e.Replica("r0", "r0:1"), e.Replica(f"x{number}", "x:1"))
        world.feed(e.ReplicasListed(both), told("r0"), e.Tick())
    world.feed(job(size=2, max_turns=9))
    assert len(world.sent(e.AcquireBox)) == 2


def test_launches_that_wait_for_the_first_probes_say_so() -> None:
    world = World(placement="predicted_finish", admission="kv_fit", probes=True)
    passes = only_r0_passes
    world.on(e.ProbeReplica, lambda c: passes(c) if c.replica == "r0" else None)
    world.feed(e.ReplicasListed(BOTH), HOST, e.RecoveryEnded(), told("r0"), told("r1"))
    world.feed(job(size=1))
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert progress.waiting_for == "the first probes of the fleet's replicas"


def test_a_conversation_that_is_verified_loads_no_replica() -> None:
    world = Fleet(replicas=1).on(e.Verify, silent).feed(job(size=1, max_turns=9))
    world.reply(0, 500, "DONE")
    load = world.machine._fleet.loads.loads["r0"]
    assert (load.sessions, load.load_tokens) == (0, 0)
    world.feed(verdict(world.sent(e.Verify)[0]))
    assert (load.sessions, load.load_tokens) == (0, 0)


def test_a_choice_that_was_weighed_names_what_each_candidate_would_take() -> None:
    world = Fleet(replicas=3).feed(job(size=1, max_turns=9))
    world.reply(0, 300)
    assert all(set(c.terms) == {"r0", "r1", "r2"} for c in world.sent(e.Generate))


def test_a_launch_needs_room_for_all_of_its_prompt() -> None:
    hall = Hall("r", reserve=100)
    hall.begin("a", 300)
    assert hall.seats.has_room(0.0)
    assert not hall.seats.launch("b", "b", 701, 0.0)
    assert hall.seats.launch("b", "b", 700, 0.0)
