"""Steps by turn: once, again, or not at all; and the limit that ended one."""

from __future__ import annotations

import pytest

from muster.errors import Exhausted, InvalidInput, NotFound, Refused
from muster.types import StepLimit
from services.sandbox.box import Evidence
from services.sandbox.ledger import Decision, Ledger, which_limit


def ran(ledger: Ledger, turn: int, command: str = "x") -> None:
    assert ledger.decide(turn, command) is Decision.RUN
    ledger.begin(turn, command)
    ledger.finish(Evidence(exit_code=turn))


def test_a_turn_runs_then_repeats() -> None:
    ledger = Ledger()
    ran(ledger, 0)
    ran(ledger, 1)
    assert ledger.decide(0, "x") is Decision.REPEAT
    assert ledger.kept(1).evidence.exit_code == 1


def test_a_running_turn_is_waited_for_and_the_next_is_refused() -> None:
    ledger = Ledger()
    ledger.begin(0, "x")
    assert ledger.decide(0, "x") is Decision.WAIT
    with pytest.raises(Refused):
        ledger.decide(1, "x")


def test_another_command_for_a_known_turn_is_refused() -> None:
    ledger = Ledger()
    ran(ledger, 0, "one")
    with pytest.raises(Refused):
        ledger.decide(0, "two")


def test_an_answer_no_longer_kept_is_refused_never_run_again() -> None:
    ledger = Ledger(kept_max=2)
    for turn in range(3):
        ran(ledger, turn)
    with pytest.raises(Refused):
        ledger.decide(0, "x")
    assert ledger.decide(1, "x") is Decision.REPEAT


def test_steps_are_bounded_and_turns_count_up() -> None:
    ledger = Ledger(steps_max=1)
    with pytest.raises(InvalidInput):
        ledger.decide(-1, "x")
    ran(ledger, 0)
    with pytest.raises(Exhausted):
        ledger.decide(1, "x")


def test_a_broken_box_runs_nothing_more_but_keeps_its_answers() -> None:
    ledger = Ledger()
    ledger.begin(0, "x")
    ledger.finish(Evidence(broken="its shell is gone"))
    assert ledger.decide(0, "x") is Decision.REPEAT
    with pytest.raises(Refused, match="its shell is gone"):
        ledger.decide(1, "x")


@pytest.mark.parametrize(
    ("evidence", "limit"),
    [
        (Evidence(), StepLimit.NONE),
        (Evidence(exit_code=1), StepLimit.NONE),
        (Evidence(exit_code=137, signal=9), StepLimit.NONE),
        (Evidence(exit_code=137, signal=9, timed_out=True, oom_kills=1), StepLimit.TIME),
        (Evidence(exit_code=137, oom_kills=1, disk_full=True), StepLimit.MEMORY),
        (Evidence(exit_code=1, pids_refused=3), StepLimit.PIDS),
        (Evidence(exit_code=1, disk_full=True), StepLimit.DISK),
        (Evidence(exit_code=0, oom_kills=1, pids_refused=1, disk_full=True), StepLimit.NONE),
    ],
)
def test_the_limit_is_told_from_the_evidence(evidence: Evidence, limit: StepLimit) -> None:
    assert which_limit(evidence) is limit


def test_a_lost_step_stays_begun_and_closes_the_box() -> None:
    ledger = Ledger()
    ledger.begin(0, "echo one")
    ledger.lose("the host died")
    assert ledger.decide(0, "echo one") is Decision.WAIT
    with pytest.raises(Refused, match="the host died"):
        ledger.decide(1, "echo two")


def test_a_box_that_is_ahead_of_its_callers_records_runs_nothing() -> None:
    ledger = Ledger()
    ran(ledger, 0)
    ran(ledger, 1, "rm -r /")
    with pytest.raises(NotFound) as caught:
        ledger.decide(2, "ls", after=0, box="b1")
    assert (caught.value.field, caught.value.value) == ("box", "b1")
    assert ledger.decide(2, "ls", after=1, box="b1") is Decision.RUN


def test_so_it_is_when_the_turn_was_sampled_anew_and_is_another_command_now() -> None:
    ledger = Ledger()
    ran(ledger, 0, "rm -r /")
    with pytest.raises(NotFound):
        ledger.decide(0, "ls", after=-1, box="b1")


def test_a_box_that_is_behind_its_callers_records_runs_nothing() -> None:
    with pytest.raises(NotFound):
        Ledger().decide(1, "ls", after=0, box="b1")


def test_the_same_step_asked_for_again_is_answered_although_it_is_the_newest() -> None:
    ledger = Ledger()
    ran(ledger, 0)
    assert ledger.decide(0, "x", after=-1, box="b1") is Decision.REPEAT
    ledger.begin(1, "y")
    assert ledger.decide(1, "y", after=0, box="b1") is Decision.WAIT
