"""An attempt that a former router left: where it goes on, what it remembers."""

from __future__ import annotations

import pytest

from muster.types import EpisodeState, Fate, Outcome, OutcomeLabel, StateInterval, StepLimit
from services.router import events as e
from tests.unit.router.granted import told as credit
from tests.unit.router.test_machine import labels, silent
from tests.unit.router.world import World, generated, job, stepped, verdict

DECODED = (
    StateInterval(EpisodeState.BOX_START, 0.0, 1.0),
    StateInterval(EpisodeState.QUEUE, 1.0, 2.0),
    StateInterval(EpisodeState.PREFILL, 2.0, 3.0),
    StateInterval(EpisodeState.DECODE, 3.0, 7.0),
)


def turn(number: int, **fields: object) -> e.TurnSeen:
    given: dict = {
        "prompt_tokens": 10 * (number + 1),
        "sampled_tokens": 5,
        "replica": "r1",
        "command": f"c{number}",
        "timeout_s": 9.0,
        "wall_s": 0.5,
        "output": f"o{number}",
    } | fields
    return e.TurnSeen(number, **given)


INTENT = e.IntentSeen(2, "c2", 9.0, 30, 5, "r1", DECODED)


def taken_over(record: e.Resume, *, max_turns: int = 5, hosts: int = 2, **rules: object) -> World:
    """A router that finds one sibling of one group in that state; replies are held back."""
    world = World(**rules)
    world.on(e.Generate, silent).on(e.Exec, silent).on(e.Verify, silent)
    world.feed(job(size=1, max_turns=max_turns))
    told = e.SiblingRestored(1, resume=record, replays=record.replays)
    world.feed(e.GroupRestored("j-00000", "j", 0, (told,)))
    return world.start(replicas=2, hosts=hosts)


def record(turns: int = 2, **fields: object) -> e.Resume:
    given: dict = {"host": "h1", "box": "old", **fields}
    return e.Resume(tuple(turn(n) for n in range(turns)), **given)


def turns_told(world: World) -> int:
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    return progress.turns


def test_the_next_turn_is_asked_for_with_the_last_observation() -> None:
    world = taken_over(record())
    (asked,) = world.sent(e.Generate)
    assert (asked.turn, asked.retry, asked.episode.attempt) == (2, 0, 1)
    assert asked.messages == (e.Message("user", "exit=0 time=0.5s\no1"),)


def test_it_goes_on_in_its_living_box() -> None:
    world = taken_over(record())
    world.feed(generated(world.sent(e.Generate)[0]))
    assert not world.sent(e.AcquireBox)
    assert [(c.host, c.box, c.turn) for c in world.sent(e.Exec)] == [("h1", "old", 2)]


def test_it_returns_to_the_replica_that_holds_its_context() -> None:
    assert [c.replica for c in taken_over(record()).sent(e.Generate)] == ["r1"]


def test_an_intended_command_is_asked_for_again_as_it_was() -> None:
    world = taken_over(record(intent=INTENT))
    asked = [(c.box, c.turn, c.command, c.timeout_s) for c in world.sent(e.Exec)]
    assert (asked, world.sent(e.Generate)) == ([("old", 2, "c2", 9.0)], [])


@pytest.mark.parametrize("repeated", [True, False])
def test_the_record_says_whether_the_box_had_kept_the_result(repeated: bool) -> None:
    world = taken_over(record(intent=INTENT))
    world.feed(stepped(world.sent(e.Exec)[0], repeated=repeated))
    (recorded,) = world.sent(e.RecordTurn)
    assert recorded.resumed is repeated


def test_a_repeated_answer_within_one_router_resumes_nothing() -> None:
    world = World().on(e.Exec, lambda c: stepped(c, repeated=True)).start().feed(job(size=1))
    assert [c.resumed for c in world.sent(e.RecordTurn)] == [False]


def test_an_attempt_began_when_the_former_router_began_it() -> None:
    world = taken_over(record(intent=INTENT), max_turns=3)
    world.feed(stepped(world.sent(e.Exec)[0])).feed(verdict(world.sent(e.Verify)[0]))
    assert [c.started_unix_s for c in world.sent(e.RecordEpisode)] == [1.0]


def test_an_intended_turn_is_recorded_with_the_time_it_took_before() -> None:
    world = taken_over(record(intent=INTENT))
    world.feed(stepped(world.sent(e.Exec)[0]))
    states = [i.state for i in world.sent(e.RecordTurn)[0].intervals]
    assert states == [*(i.state for i in DECODED), EpisodeState.TOOL]


def test_tokens_spent_before_count() -> None:
    world = taken_over(record(), episode_tokens_max=12)
    assert [c.max_tokens for c in world.sent(e.Generate)] == [2]


def test_context_used_before_counts() -> None:
    world = taken_over(record(), context_tokens_max=30)
    assert [c.max_tokens for c in world.sent(e.Generate)] == [5]


def test_time_spent_before_counts_but_not_that_of_waiting() -> None:
    slow = e.Resume((turn(0, intervals=DECODED, wall_s=2.0),), host="h1", box="old")
    world = taken_over(slow, episode_timeout_s=10.0)
    world.feed(generated(world.sent(e.Generate)[0], end_unix_s=1.0))
    assert [c.timeout_s for c in world.sent(e.Exec)] == [pytest.approx(3.0)]


def test_unparseable_replies_before_count() -> None:
    mute = {"command": "", "timeout_s": 0.0}
    said_nothing = e.Resume(tuple(turn(n, **mute) for n in range(2)), host="h1", box="old")
    world = taken_over(said_nothing, unparseable_max=3)
    world.feed(generated(world.sent(e.Generate)[0], "hmm"))
    assert [x.cause for x in labels(world)] == ["unparseable"]


def test_the_time_without_a_router_is_a_hold() -> None:
    world = taken_over(e.Resume((turn(0, intervals=DECODED),), host="h1", box="old"))
    world.feed(generated(world.sent(e.Generate)[0], "DONE", start_unix_s=20.0, end_unix_s=21.0))
    first = world.sent(e.RecordTurn)[0].intervals[0]
    assert first == StateInterval(EpisodeState.HOLD, 7.0, 20.0)


def test_so_it_is_before_a_step_whose_result_was_waited_for() -> None:
    world = taken_over(record(intent=INTENT))
    asked = world.sent(e.Exec)[0]
    world.feed(stepped(asked, start_unix_s=20.0, end_unix_s=21.0))
    last = world.sent(e.RecordTurn)[0].intervals[-2:]
    assert last[0] == StateInterval(EpisodeState.HOLD, 7.0, 20.0)
    assert last[1].state is EpisodeState.TOOL


@pytest.mark.parametrize("told_before", [True, False])
def test_what_was_left_of_a_group_with_a_fate_is_given_back(told_before: bool) -> None:
    world = World().feed(job(size=1))
    told = e.SiblingRestored(0, resume=record())
    fate, group = (
        e.FateRecorded("j-00000", Fate.FILTERED),
        e.GroupRestored("j-00000", "j", 0, (told,)),
    )
    world.feed(*((fate, group) if told_before else (group, fate)))
    assert [(c.host, c.box) for c in world.sent(e.ReleaseBox)] == [("h1", "old")]


@pytest.mark.parametrize(
    ("last", "max_turns"), [({"command": "", "done": True}, 5), ({}, 1)], ids=["done", "turns"]
)
def test_an_episode_that_had_ended_is_verified_again(last: dict, max_turns: int) -> None:
    ended = e.Resume((turn(0, **last),), host="h1", box="old")
    world = taken_over(ended, max_turns=max_turns)
    assert [(c.host, c.box) for c in world.sent(e.Verify)] == [("h1", "old")]


def test_a_box_that_its_agent_broke_ends_as_it_would_have() -> None:
    broken = turn(0, box_broken=True, limit=StepLimit.MEMORY)
    world = taken_over(e.Resume((broken,), host="h1", box="old"))
    assert [x.cause for x in labels(world)] == ["box_broken_by_memory"]


def test_records_that_are_lost_end_the_attempt_by_name_and_another_follows() -> None:
    world = taken_over(record(broken="the tokens of turn 1 are not in Redis any more"))
    assert [(x.outcome, x.cause) for x in labels(world)] == [(Outcome.INFRA_FAILURE, "record_lost")]
    assert [(c.episode.attempt, c.fresh) for c in world.sent(e.AcquireBox)] == [(2, False)]
    assert [c.box for c in world.sent(e.ReleaseBox)] == ["old"]


def test_an_attempt_without_a_record_starts_over_in_a_fresh_box() -> None:
    world = World().feed(job(size=1))
    told = e.SiblingRestored(1, started=True)
    world.feed(e.GroupRestored("j-00000", "j", 0, (told,))).start()
    assert [(c.episode.attempt, c.fresh) for c in world.sent(e.AcquireBox)] == [(1, True)]


def test_living_boxes_come_before_new_ones() -> None:
    world = World(episodes_max=1).on(e.Generate, silent).feed(job(groups=2, size=1, max_turns=5))
    new, old = e.SiblingRestored(0, started=True), e.SiblingRestored(0, resume=record())
    world.feed(e.GroupRestored("j-00000", "j", 0, (new,)))
    world.feed(e.GroupRestored("j-00001", "j", 1, (old,)))
    world.start(hosts=2)
    assert [c.episode.group for c in world.sent(e.Generate)] == ["j-00001"]


def test_what_a_cancelled_job_had_left_is_given_back() -> None:
    world = World().feed(job(size=1))
    told = e.SiblingRestored(0, resume=record())
    world.feed(e.GroupRestored("j-00000", "j", 0, (told,)), e.JobCancelled("j")).start()
    assert [(c.host, c.box) for c in world.sent(e.ReleaseBox)] == [("h1", "old")]
    assert len(world.sent(e.DropConversation)) == 1


def test_the_fleet_counts_boxes_that_were_taken_over() -> None:
    world = taken_over(record())
    assert world.machine._fleet.hosts.boxes == {"h1": 1}
    world.feed(e.JobCancelled("j"))
    assert world.machine._fleet.hosts.boxes == {"h1": 0}


def test_a_restart_counts_what_was_there_before() -> None:
    lost = e.Ended(OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost"), turns=3, replays=1)
    told = e.SiblingRestored(1, resume=record(replays=1), earlier=(lost,), replays=1)
    world = World().on(e.Generate, silent).feed(job(size=1, max_turns=5))
    world.feed(e.GroupRestored("j-00000", "j", 0, (told,)))
    progress = world.start().machine.progress("j", world.now)
    assert progress is not None
    assert (progress.repairs, progress.turns) == (3, 3)
    assert progress.outcomes == {"infra_failure": 1}


def test_retired_groups_are_counted_and_not_opened_again() -> None:
    world = World(groups_per_batch=9).feed(job(groups=4, size=1))
    world.feed(e.JobTotals("j", 1, 1, 3, 5, 1, {"model_success": 2, "infra_failure": 1}, (0, 2)))
    world.feed(e.GroupRestored("j-00001", "j", 1, (e.SiblingRestored(0),))).start()
    progress = world.machine.progress("j", world.now)
    assert progress is not None
    assert (progress.groups_trained, progress.groups_filtered, progress.repairs) == (1, 1, 1)
    opened = [c.group for c in world.sent(e.OpenGroup)]
    assert opened == ["j-00003", "j-00004"]  # the filtered one is replaced


def test_a_host_that_is_not_listed_yet_is_waited_for() -> None:
    world = taken_over(record(intent=INTENT), hosts=1, resume_wait_s=10.0).wait(5.0)
    assert not world.sent(e.Exec)
    world.feed(e.HostsListed((e.Host("h1", "h1:1"),)))
    assert [(c.host, c.box) for c in world.sent(e.Exec)] == [("h1", "old")]


def test_a_host_that_stays_away_is_not_waited_for_any_longer() -> None:
    world = taken_over(record(intent=INTENT), hosts=1, resume_wait_s=10.0).wait(10.5)
    assert [c.host for c in world.sent(e.Exec)] == ["h1"]


def test_what_waits_for_its_host_keeps_its_place_and_holds_up_nobody_else() -> None:
    world = World(episodes_max=2).on(e.Generate, silent)
    world.feed(job(groups=3, size=1, max_turns=5))
    new, old = e.SiblingRestored(0, started=True), e.SiblingRestored(0, resume=record())
    for index, told in enumerate((old, new, new)):
        world.feed(e.GroupRestored(f"j-0000{index}", "j", index, (told,)))
    world.start()
    assert [c.episode.group for c in world.sent(e.AcquireBox)] == ["j-00001"]
    world.feed(e.HostsListed((e.Host("h1", "h1:1"),)))
    assert [c.episode.group for c in world.sent(e.Generate)] == ["j-00001", "j-00000"]


def test_a_resumed_step_tells_what_ran_in_its_box_by_the_records() -> None:
    said = turn(1, command="")
    told = e.Resume((turn(0), said), INTENT, host="h1", box="old")
    assert [c.after for c in taken_over(told).sent(e.Exec)] == [0]


def test_it_has_its_seat_where_its_intended_reply_was_sampled() -> None:
    """Its first turn is not recorded yet: only the intent knows where its KV lies."""
    rules = {"placement": "predicted_finish", "admission": "kv_fit", "probes": True}
    world = World(**rules).on(e.Generate, silent).on(e.Exec, silent)
    world.feed(job(size=1, max_turns=5))
    intent = e.IntentSeen(0, "c0", 9.0, 300, 5, "r1", DECODED)
    told = e.SiblingRestored(1, resume=e.Resume((), intent, "h1", "old", 0))
    world.feed(e.GroupRestored("j-00000", "j", 0, (told,)))
    world.start(replicas=2, hosts=2)
    world.feed(credit("r0", credit_tokens=9000), credit("r1", credit_tokens=9000))
    world.feed(stepped(world.sent(e.Exec)[0]))
    (asked,) = world.sent(e.Generate)
    assert (asked.replica, asked.cached) == ("r1", 305)


def test_turns_of_attempts_that_run_count_at_once() -> None:
    world = taken_over(record())
    assert turns_told(world) == 2
    world.feed(generated(world.sent(e.Generate)[0]))
    world.feed(stepped(world.sent(e.Exec)[0]))
    assert turns_told(world) == 3


def test_turns_are_not_forgotten_when_their_group_is_stopped() -> None:
    world = taken_over(record())
    world.feed(e.JobCancelled("j"))
    assert turns_told(world) == 2
