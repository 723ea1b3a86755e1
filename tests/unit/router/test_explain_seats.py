"""What people are told of holds, room and replicas that take no turn."""

from __future__ import annotations

from services.router import events as e
from tests.unit.router.granted import Fleet, held, told
from tests.unit.router.test_machine import silent
from tests.unit.router.world import World, job


def test_a_held_episode_tells_why_and_leads_to_the_one_that_goes_first() -> None:
    world = held()
    *_, line = world.said("j-00000.1.0")
    assert line.state == "turn 1: held"
    assert line.waits_for == (
        "room in the KV cache of r0: it needs 400 tokens, others fill 600 of 1,000 "
        "(at most 97 % may be filled); it goes on when one of them ends or has to wait itself"
    )
    assert line.next_command == "muster explain j-00000.0.0"


def test_a_sibling_that_no_replica_has_room_for_tells_what_is_taken() -> None:
    world = Fleet(reserve_tokens=400).feed(job(size=4))
    [line] = world.said("j-00000.3")
    assert line.state == "not launched yet"
    assert line.waits_for.startswith("room in a replica's KV cache (r0: ")


def test_a_fleet_in_which_nobody_is_proven_tells_why() -> None:
    world = World(placement="predicted_finish", admission="kv_fit", probes=True)
    world.on(e.ProbeReplica, silent).start().feed(told(), job())
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert progress.waiting_for == (
        "an inference replica that takes turns (r0 answers a probe first)"
    )


def test_one_whose_replica_takes_no_turn_now_tells_that() -> None:
    world = Fleet().on(e.ProbeReplica, silent).feed(job(size=1, max_turns=9))
    world.feed(told(serving=False, credit_tokens=0, detail="it takes weights")).wait(1.0)
    *_, line = world.said("j-00000.0.0")
    assert line.waits_for == "a replica that takes it (r0 serves nothing: it takes weights)"


def test_the_run_names_a_replica_that_takes_no_turns_while_others_do() -> None:
    world = Fleet(replicas=2).feed(job(size=1, max_turns=9))
    world.feed(told("r1", serving=False, credit_tokens=0, detail="it takes weights"))
    first, *others = world.said("")
    assert (first.subject, first.state) == (
        "replica r1",
        "takes no turns: r1 serves nothing: it takes weights",
    )
    assert first.next_command == "tail -n 20 logs/inference*.log"
    assert others[0].subject == "j"
