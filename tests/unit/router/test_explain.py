"""What waits, said by the router: for what, since when, who has to move."""

from __future__ import annotations

from muster.types import Waiting
from services.router import events as e
from tests.unit.router.world import World, generated, job

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
    [line] = said(world, "j-00000.1.0")
    assert line.state == "turn 0: runs `sleep 600`"
    assert line.waits_for == "the end of the command, or its limit of 10 s"
    assert line.owner == "h0"
    assert line.since_unix_s == WALL - 38.0
    assert line.next_command == "tail -n 20 logs/sandbox.log"


def test_waiting_longer_moves_no_beginning() -> None:
    world = hung()
    before = said(world, "j-00000.1.0")[0].since_unix_s
    world.wait(5.0)
    world.wait(5.0)
    assert said(world, "j-00000.1.0")[0].since_unix_s == before - 10.0


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
    assert said(world, "j-00000")[0].waits_for == "a batch, or its fate"
    assert said(world, "nobody") == []


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
