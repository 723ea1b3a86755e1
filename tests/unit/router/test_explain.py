"""What waits, said by the router: for what, since when, who has to move."""

from __future__ import annotations

import pytest

from muster.explained import Answer, explained
from muster.record import RunRecord
from muster.run_index import RunIndex
from muster.subject import Kind, Subject
from muster.types import Fate, Waiting
from services.router import events as e
from tests.unit.router.world import World, failed, generated, job

WALL = 5_000.0


def hung() -> World:
    """Sibling 1 of the only group runs a command that does not come back."""
    world = World(stall_s=60.0)

    def reply(command: e.Generate) -> e.Generated:
        text = "```bash\nsleep 600\n```" if command.episode.sibling == 1 else "DONE"
        return generated(command, text)

    world.on(e.Generate, reply).on(e.Exec, lambda c: None)
    return world.start().feed(job(size=3, max_turns=3))


def said(world: World, subject: str = "") -> list[Waiting]:
    return world.machine.explain(subject, world.now, WALL, "logs")


def test_the_run_names_the_group_and_the_sibling_that_hold_it_up() -> None:
    world = hung()
    lines = said(world)
    assert [line.subject for line in lines] == ["j", "j-00000", "j-00000.1.0"]
    assert lines[1].state == "2 of 3 siblings ended"
    assert lines[1].next_command == "muster explain j-00000.1.0"


def test_a_hung_step_tells_its_command_its_limit_its_host_and_since_when() -> None:
    world = hung()
    world.wait(38.0)
    *_, line = said(world, "j-00000.1.0")
    assert line.state == "turn 0: runs `sleep 600`"
    assert line.waits_for == "the end of the command, or its limit of 10 s, which ends it"
    assert line.owner == "sandbox host h0"
    assert line.since_unix_s == WALL - 38.0
    assert line.next_command == "muster watch j"  # it ends by itself, no log tells more


def test_who_has_to_move_is_the_same_all_along_the_chain() -> None:
    lines = said(hung())
    assert {line.owner for line in lines[1:]} == {"sandbox host h0"}


def test_a_complete_group_names_the_groups_that_its_batch_waits_for() -> None:
    world = World()
    world.on(e.Exec, lambda c: None)

    def reply(command: e.Generate) -> e.Generated:
        hangs = command.episode.group == "j-00001"
        return generated(command, "```bash\nsleep 600\n```" if hangs else "DONE")

    world.on(e.Generate, reply).start().feed(job(groups=2, max_turns=3))
    line = said(world, "j-00000")[0]
    assert line.waits_for == "a batch, which waits for groups that are open: j-00001"
    assert (line.owner, line.next_command) == ("router", "muster explain j-00001")


def test_without_a_replica_the_inference_service_has_to_move() -> None:
    world = World().start(replicas=0).feed(job())
    assert said(world)[0].waits_for == "an inference replica (none is announced)"
    assert said(world)[0].owner == "inference"
    assert said(world)[0].next_command == "tail -n 20 logs/inference*.log"


def test_without_room_in_redis_redis_has_to_move() -> None:
    world = World().start().feed(e.MemoryTold("Redis uses 101% of its high-water mark"), job())
    [line] = said(world)
    assert line.waits_for == "Redis uses 101% of its high-water mark"
    assert (line.owner, line.next_command) == ("redis", "tail -n 20 logs/redis.log")


def test_a_batch_that_lacks_groups_nobody_has_submitted_waits_for_a_client() -> None:
    """The job does not lead back to itself."""
    world = World(groups_per_batch=2).start().feed(job())
    [line] = said(world, "j")
    assert (line.owner, line.next_command) == ("client", "muster submit tasks/")
    group = said(world, "j-00000")[0]
    assert group.waits_for.startswith("a batch, which waits for more groups: 1 are complete")
    assert (group.owner, group.next_command) == ("client", "muster explain batch")


def test_waiting_longer_moves_no_beginning() -> None:
    world = hung()
    before = said(world, "j-00000.1.0")[-1].since_unix_s
    world.wait(5.0)
    world.wait(5.0)
    assert said(world, "j-00000.1.0")[-1].since_unix_s == before - 10.0


def test_the_sibling_that_stands_longest_comes_first() -> None:
    world = World().on(e.Generate, lambda c: None)
    world.start().feed(job(size=2, max_turns=3))
    world.wait(7.0)
    generate = world.sent(e.Generate)[0]
    world.on(e.Exec, lambda c: None).feed(generated(generate))
    lines = said(world, "j-00000")
    assert [line.subject for line in lines[1:]] == ["j-00000.1.0", "j-00000.0.0"]


def test_a_sibling_that_is_not_launched_says_what_holds_it() -> None:
    world = World(episodes_max=1).on(e.Generate, lambda c: None).start().feed(job(size=2))
    [line] = said(world, "j-00000.1")
    assert (line.state, line.waits_for) == (
        "not launched yet",
        "a place among the running episodes",
    )


def test_what_has_ended_is_not_explained() -> None:
    world = World().start().feed(job())
    assert said(world, "j-00000.0.0")[0].state.startswith("ended: model_success")
    assert said(world, "j-00000")[0].waits_for.startswith("a batch")
    assert said(world, "nobody") == []
    assert said(world, "j-00000.²") == []  # a digit, and no number


def test_an_ended_job_waits_for_nothing() -> None:
    world = World().start().feed(job()).feed(e.FateRecorded("j-00000", Fate.TRAINED, 1))
    [line] = said(world, "j")
    assert (line.state, line.waits_for) == ("done: 1 of 1 groups have a fate", "")


def test_a_run_without_jobs_says_how_to_begin() -> None:
    [line] = said(World().start())
    assert line.next_command == "muster submit tasks/"


def test_a_run_that_does_not_move_says_so_once_for_each_interval() -> None:
    world = hung()
    for _ in range(9):
        world.wait(10.0)
    assert len(world.sent(e.TellStall)) == 1
    [stall] = world.sent(e.TellStall)
    assert stall.lines[-1].subject == "j-00000.1.0"
    for _ in range(6):
        world.wait(10.0)
    assert len(world.sent(e.TellStall)) == 2


def test_a_run_that_moves_is_not_stalled() -> None:
    world = hung()
    for number in range(9):
        world.feed(e.VersionPublished(number, number)).wait(10.0)
    assert not world.sent(e.TellStall)


def test_a_run_in_which_everything_fails_is_stalled_however_busy_it_is() -> None:
    world = World(stall_s=60.0, repairs_max=9, generate_retries_max=1)
    world.on(e.Generate, lambda c: failed(c, "no such device"))
    world.start().feed(job(size=2, max_turns=3))
    for second in range(70):
        world.feed(e.HostsListed((e.Host("h0", f"h0:{second}"),))).wait(1.0)
    assert world.sent(e.TellStall)


def unstartable() -> World:
    """Every box is refused, so that each attempt is ended by infrastructure."""
    world = World(groups_per_batch=2, lag_max=9, repairs_max=2, infra_pause_s=30.0)
    why = "this host has no base for that image"
    world.on(e.AcquireBox, lambda c: e.BoxRefused(c.episode, c.host, why, retryable=False))
    return world.start().feed(job(groups=2, size=2))


@pytest.mark.parametrize("subject", ["", "j"])
def test_what_infrastructure_ended_last_is_told_and_leads_to_that_attempt(subject: str) -> None:
    lines = said(unstartable(), subject)
    assert lines[0].subject == "j"
    assert lines[1].state == (
        "ended: infra_failure (box_start): this host has no base for that image"
    )
    assert lines[1].subject.startswith("j-0000")
    assert lines[1].next_command == f"muster explain {lines[1].subject}"
    assert lines[1].waits_for  # else the command line would not follow it


def test_a_group_tells_its_own_newest_failure_first() -> None:
    world = World(repairs_max=9)
    refused = []

    def answer(command: e.AcquireBox) -> e.BoxRefused | None:
        refused.append(command.episode.id)
        if len(refused) == 1:
            return e.BoxRefused(command.episode, command.host, "no room", retryable=False)
        return None

    world.on(e.AcquireBox, answer).start().feed(job(size=2))
    head, first, *_ = said(world, "j-00000")
    assert first.subject == refused[0]
    assert first.state == "ended: infra_failure (box_start): no room"
    assert head.next_command == f"muster explain {first.subject}"


def test_after_a_valid_end_an_older_failure_is_told_no_more() -> None:
    world = World(repairs_max=9)
    refused = []

    def answer(command: e.AcquireBox) -> e.BoxRefused | e.BoxAcquired:
        refused.append(command.episode.id)
        if len(refused) == 1:
            return e.BoxRefused(command.episode, command.host, "no room", retryable=False)
        return e.BoxAcquired(command.episode, command.host, command.episode.id, 0.0, 0.0)

    world.on(e.AcquireBox, answer).start().feed(job(size=2))
    world.wait(1.0)
    assert len(refused) == 3
    assert not [line for line in said(world, "j") if "no room" in line.state]


def test_the_failed_attempt_itself_tells_why_and_does_not_lead_back() -> None:
    world = unstartable()
    newest = said(world)[1].subject
    [line] = said(world, newest)
    assert line.state.endswith("this host has no base for that image")
    assert line.next_command == "muster hosts"


@pytest.mark.parametrize("kind", [Kind.RUN, Kind.JOB, Kind.GROUP])
def test_the_command_line_follows_the_failure_and_ends_there(kind: Kind) -> None:
    world = unstartable()
    failed = said(world)[1].subject
    asked = {Kind.RUN: "run", Kind.JOB: "j", Kind.GROUP: failed.partition(".")[0]}[kind]
    assert _next_of(world, Subject(kind, asked)) == f"muster explain {failed}"
    assert _next_of(world, Subject(Kind.EPISODE, failed)) == "muster hosts"


def _next_of(world: World, asked: Subject) -> str:
    subject = "" if asked.kind is Kind.RUN else asked.id
    answers = {kind: Answer(kind) for kind in ("trainer", "readybank", "router")}
    answers["router"] = Answer("router", tuple(said(world, subject)))
    waits = Waiting("j-00000.1.0", "nothing recorded", "the router", next_command="muster explain")
    answers["readybank"] = Answer("readybank", (waits,))
    return explained(RunIndex(RunRecord("run")), asked, answers, WALL).next_command
