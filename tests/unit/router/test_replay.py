"""A box or its host is lost: the box is rebuilt elsewhere, or the attempt ends by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from muster.types import EpisodeState, Outcome, StepLimit
from services.router import events as e
from tests.unit.router.test_machine import labels
from tests.unit.router.world import BLOCK, Answer, World, generated, job, stepped, verdict

GONE, KILLED = e.Loss.BOX_GONE, e.Loss.BOX_KILLED


class Hosts:
    """Boxes by number; `again` changes what a command shows in the second one."""

    def __init__(self, lose: Callable[[e.Exec], e.Loss | None], **again: object):
        self.lose, self.again, self.made = lose, again, 0

    def acquire(self, command: e.AcquireBox) -> e.RouterEvent:
        self.made += 1
        box = f"b{self.made}"
        return e.BoxAcquired(command.episode, command.host, box, 10.0 * self.made, 11.0)

    def exec(self, command: e.Exec) -> e.RouterEvent:
        loss = self.lose(command)
        if loss is not None:
            return e.StepFailed(command.episode, command.turn, "gone", loss, command.box)
        given = {"output": f"o{command.turn}", "box": command.box}
        return stepped(command, **(given | self.again if command.box == "b2" else given))


def played(
    hosts: Hosts,
    *,
    turns: int = 5,
    machines: int = 2,
    verify: Answer | None = None,
    **rules: object,
) -> World:
    world = World(**rules).on(e.AcquireBox, hosts.acquire).on(e.Exec, hosts.exec)
    world.on(e.Generate, lambda c: generated(c, BLOCK.replace("hi", f"hi {c.turn}")))
    if verify is not None:
        world.on(e.Verify, verify)
    world.start(hosts=machines).feed(job(size=1, max_turns=turns))
    return world


def at_turn_3(command: e.Exec) -> e.Loss | None:
    return GONE if (command.box, command.turn) == ("b1", 3) else None


def ran(world: World, box: str) -> list[int]:
    return [c.turn for c in world.sent(e.Exec) if c.box == box]


def test_a_lost_box_is_rebuilt_elsewhere_and_the_episode_goes_on_with_its_tokens() -> None:
    world = played(Hosts(at_turn_3))
    assert (ran(world, "b1"), ran(world, "b2")) == ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    assert [c.turn for c in world.sent(e.Generate)] == [0, 1, 2, 3, 4]
    assert {c.host for c in world.sent(e.AcquireBox)} == {"h0", "h1"}
    assert [(x.outcome, x.replays) for x in labels(world)] == [(Outcome.MODEL_SUCCESS, 1)]


def test_what_was_rebuilt_is_recorded_before_anything_new_runs() -> None:
    world = played(Hosts(at_turn_3))
    (told,) = world.sent(e.RecordRestored)
    lost, new = (told.lost_host, told.lost_box), (told.host, told.box)
    assert (told.repair, lost, new, told.turns_replayed) == (1, ("h0", "b1"), ("h1", "b2"), 3)
    order = [c for c in world.log if isinstance(c, e.RecordRestored | e.Exec)]
    assert [c.turn for c in order[order.index(told) + 1 :]] == [3, 4]


def test_the_recorded_commands_run_again_with_their_own_limits() -> None:
    world = played(Hosts(at_turn_3))
    first, second = ([c for c in world.sent(e.Exec) if c.box == b][:3] for b in ("b1", "b2"))
    assert [(c.command, c.timeout_s) for c in second] == [(c.command, c.timeout_s) for c in first]


@pytest.mark.parametrize(
    "again",
    [{"output": "Tue"}, {"exit_code": 1}, {"limit": StepLimit.TIME}, {"box_broken": True}],
    ids=str,
)
def test_a_box_that_answers_otherwise_is_not_the_same_and_the_attempt_starts_anew(
    again: dict,
) -> None:
    world = played(Hosts(at_turn_3, **again), repairs_max=1)
    lost, last = labels(world)
    assert (lost.outcome, lost.cause) == (Outcome.INFRA_FAILURE, "replay_differs")
    assert "turn 0" in lost.detail
    assert last.outcome.valid
    assert [c.turn for c in world.sent(e.Generate)][-5:] == [0, 1, 2, 3, 4]


def test_the_models_time_and_figures_are_not_charged_for_a_replay() -> None:
    slow = {"wall_s": 90.0, "cpu_s": 50.0, "cpu_stall_s": 30.0}

    class Slow(Hosts):
        def exec(self, command: e.Exec) -> e.RouterEvent:
            event = super().exec(command)
            replayed = command.box == "b2" and command.turn < 3
            if isinstance(event, e.StepFinished) and replayed:
                return stepped(command, output=f"o{command.turn}", **slow)
            return event

    world = played(Slow(at_turn_3), episode_timeout_s=20.0)
    (label,) = labels(world)
    assert (label.outcome, label.cpu_stall_s) == (Outcome.MODEL_SUCCESS, 0.0)
    assert label.cpu_s == pytest.approx(0.5)


def test_replayed_time_is_the_starting_of_a_box() -> None:
    world = played(Hosts(at_turn_3))
    turn = next(c for c in world.sent(e.RecordTurn) if c.turn == 3)
    assert [i.state for i in turn.intervals].count(EpisodeState.BOX_START) == 4
    assert [i.state for i in turn.intervals].count(EpisodeState.TOOL) == 1


def test_rebuilding_is_counted_with_the_repairs_and_bounded() -> None:
    world = played(Hosts(lambda c: GONE if c.turn == 2 else None), repairs_max=1)
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert progress.repairs == 3  # a box and an attempt, and a box of that
    assert [(x.cause, x.replays) for x in labels(world)] == [("host_lost", 1)] * 2


def test_a_box_lost_while_it_is_rebuilt_is_one_more_repair() -> None:
    places = {("b1", 3), ("b2", 1)}
    world = played(Hosts(lambda c: GONE if (c.box, c.turn) in places else None), repairs_max=2)
    assert ran(world, "b3") == [0, 1, 2, 3, 4]
    assert [(x.outcome, x.replays) for x in labels(world)] == [(Outcome.MODEL_SUCCESS, 1)]


def test_the_same_command_that_takes_two_hosts_with_it_is_the_models_failure() -> None:
    world = played(Hosts(lambda c: KILLED if c.turn == 3 else None), machines=3)
    assert [(x.outcome, x.cause) for x in labels(world)] == [
        (Outcome.MODEL_FAILURE, "command_kills_hosts")
    ]
    assert len([c for c in world.sent(e.Exec) if c.turn == 3]) == 2  # no third host is risked


def test_two_boxes_lost_before_the_command_reached_them_blame_nobody() -> None:
    world = played(Hosts(lambda c: GONE if c.turn == 3 else None), repairs_max=1)
    assert {x.outcome for x in labels(world)} == {Outcome.INFRA_FAILURE}


def test_one_host_that_dies_twice_is_no_proof_against_the_command() -> None:
    world = played(Hosts(lambda c: KILLED if c.turn == 3 else None), machines=1, repairs_max=1)
    assert {x.cause for x in labels(world)} == {"host_lost"}


def test_a_result_that_cannot_be_learned_is_not_guessed() -> None:
    world = played(Hosts(lambda c: e.Loss.UNKNOWN if c.box == "b1" and c.turn else None))
    assert [x.cause for x in labels(world)] == ["host_lost", "passed"]
    assert not world.sent(e.RecordRestored)


def test_the_lost_box_is_given_back_in_case_it_lives() -> None:
    world = played(Hosts(at_turn_3))
    assert [(c.host, c.box) for c in world.sent(e.ReleaseBox)] == [("h0", "b1"), ("h1", "b2")]


def test_on_its_own_host_the_new_box_is_a_fresh_one() -> None:
    world = played(Hosts(at_turn_3), machines=1)
    assert [c.fresh for c in world.sent(e.AcquireBox)] == [False, True]
    assert [c.box for c in world.sent(e.ReleaseBox)] == ["b1", "b2"]


def test_a_box_that_is_gone_at_the_verdict_is_rebuilt_and_verified() -> None:
    def verify(command: e.Verify) -> e.RouterEvent:
        if command.box == "b1":
            return e.VerifyFailed(command.episode, "no such box", GONE)
        return verdict(command)

    world = played(Hosts(lambda c: None), turns=2, verify=verify)
    assert (ran(world, "b1"), ran(world, "b2")) == ([0, 1], [0, 1])
    assert [(x.outcome, x.replays) for x in labels(world)] == [(Outcome.MODEL_SUCCESS, 1)]


def test_a_host_that_does_not_answer_the_verifier_is_asked_again_first() -> None:
    def verify(command: e.Verify) -> e.RouterEvent:
        if command.box == "b1":
            return e.VerifyFailed(command.episode, "away", KILLED)
        return verdict(command)

    world = played(Hosts(lambda c: None), turns=2, verify=verify)
    assert [c.box for c in world.sent(e.Verify)] == ["b1", "b1", "b2"]
    assert [x.outcome for x in labels(world)] == [Outcome.MODEL_SUCCESS]


def test_a_late_answer_of_the_lost_box_changes_nothing() -> None:
    world = played(Hosts(at_turn_3))
    before = list(world.log)
    late = next(c for c in world.sent(e.Exec) if c.box == "b1" and c.turn == 2)
    world.feed(stepped(late, output="other", box="b1"))
    assert world.log == before


def test_a_late_answer_of_the_lost_box_is_not_taken_for_the_new_ones() -> None:
    held: list[e.Exec] = []

    class Slow(Hosts):
        def exec(self, command: e.Exec) -> e.RouterEvent | None:  # type: ignore[override]
            if command.box == "b2" and not held:
                held.append(command)
                return None
            return super().exec(command)

    hosts = Slow(at_turn_3)
    world = played(hosts)
    late = next(c for c in world.sent(e.Exec) if c.box == "b1" and c.turn == 0)
    world.feed(stepped(late, output="other", box="b1"))
    world.feed(hosts.exec(held[0]))
    assert [(x.outcome, x.replays) for x in labels(world)] == [(Outcome.MODEL_SUCCESS, 1)]


def test_a_refused_new_box_is_asked_for_again_away_from_the_lost_one() -> None:
    hosts = Hosts(at_turn_3)
    asked: list[str] = []

    def acquire(command: e.AcquireBox) -> e.RouterEvent:
        asked.append(command.host)
        if len(asked) == 2:
            return e.BoxRefused(command.episode, command.host, "full", retryable=True)
        return hosts.acquire(command)

    world = World().on(e.AcquireBox, acquire).on(e.Exec, hosts.exec)
    world.on(e.Generate, lambda c: generated(c, BLOCK))
    world.start(hosts=2).feed(job(size=1, max_turns=5)).wait(3.0)
    assert asked == ["h0", "h1", "h1"]


def test_nothing_is_left_counted_after_a_replay() -> None:
    fleet = played(Hosts(at_turn_3)).machine._fleet
    assert (sum(fleet.hosts.boxes.values()), len(fleet.loads.homes)) == (0, 0)


@pytest.mark.parametrize(
    ("stall_s", "cause"), [(9.0, "host_starved"), (1.0, "not_passed"), (-1.0, "not_passed")]
)
def test_a_step_that_ran_out_of_time_on_a_busy_host_is_not_the_models(
    stall_s: float, cause: str
) -> None:
    world = World(repairs_max=0).on(e.Verify, lambda c: verdict(c, 0.0))
    world.on(e.Generate, lambda c: generated(c, "DONE" if c.turn else BLOCK))
    slow = {"limit": StepLimit.TIME, "wall_s": 10.0, "cpu_s": 0.5, "cpu_stall_s": stall_s}
    world.on(e.Exec, lambda c: stepped(c, **slow)).start().feed(job(size=1, max_turns=3))
    assert [x.cause for x in labels(world)] == [cause]


def test_hosts_that_die_while_a_finished_command_is_replayed_do_not_convict_it() -> None:
    places = {("b1", 3): GONE, ("b2", 1): KILLED, ("b3", 1): KILLED}
    hosts = Hosts(lambda c: places.get((c.box, c.turn)))
    world = played(hosts, machines=3, repairs_max=4)
    assert [(x.outcome, x.replays) for x in labels(world)] == [(Outcome.MODEL_SUCCESS, 1)]


def test_each_step_tells_what_ran_in_its_box_by_the_records() -> None:
    world = played(Hosts(at_turn_3))
    told = [(c.box, c.turn, c.after) for c in world.sent(e.Exec)]
    assert told[:4] == [("b1", n, n - 1) for n in range(4)]
    assert told[4:] == [("b2", n, n - 1) for n in range(5)]
    assert [c.after for c in world.sent(e.Verify)] == [4]


def test_a_turn_without_a_command_does_not_count_as_run() -> None:
    world = World().on(e.Generate, lambda c: generated(c, BLOCK if c.turn != 1 else "hmm"))
    world.start().feed(job(size=1, max_turns=3))
    assert [(c.turn, c.after) for c in world.sent(e.Exec)] == [(0, -1), (2, 0)]


def test_a_task_that_asks_for_more_turns_than_a_box_runs_ends_by_its_turns() -> None:
    world = played(Hosts(lambda c: None), turns=9, box_steps_max=3)
    assert ran(world, "b1") == [0, 1, 2]
    assert [x.outcome for x in labels(world)] == [Outcome.MODEL_SUCCESS]
