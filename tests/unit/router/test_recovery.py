"""What the records of a former router lead to."""

from __future__ import annotations

import pytest

from muster.types import Outcome, OutcomeLabel
from services.router.carriers import Ended, IntentSeen, Resume, SiblingRestored, TurnSeen
from services.router.recovery import AttemptSeen, restore_siblings

GOOD = OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", 1.0)
LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "box_start")


def turn(number: int) -> TurnSeen:
    return TurnSeen(number, 10, 5, command="echo hi")


def intent(number: int) -> IntentSeen:
    return IntentSeen(number, "echo hi", 9.0, 10, 5)


def seen(attempt: int = 0, turns: int = 0, *, ended: bool = False) -> AttemptSeen:
    made = AttemptSeen(0, attempt).in_box("h0", "b0")
    for number in range(turns):
        made = made.intended(intent(number)).turned(turn(number))
    return made.ended(turns) if ended else made


@pytest.mark.parametrize(
    ("records", "labels", "want"),
    [
        ([], {}, SiblingRestored(0, started=True)),
        ([seen(turns=2, ended=True)], {(0, 0): GOOD}, SiblingRestored(0, GOOD, 2)),
        (
            [seen(ended=True)],
            {(0, 0): LOST},
            SiblingRestored(1, started=True, earlier=(Ended(LOST),)),
        ),
        ([seen(2, ended=True)], {(0, 2): LOST}, SiblingRestored(2, LOST, 0)),
        (
            [seen(turns=1).ended(2)],
            {(0, 0): GOOD},
            SiblingRestored(1, started=True, earlier=(Ended(GOOD, 1),)),
        ),
        ([seen(2, turns=1).ended(2)], {(0, 2): LOST}, SiblingRestored(2, LOST, 1)),
        ([seen(ended=True)], {}, SiblingRestored(1, started=True)),
        (
            [seen(1), seen(0, 2, ended=True)],
            {(0, 0): GOOD},
            SiblingRestored(1, started=True, earlier=(Ended(GOOD, 2),)),
        ),
    ],
    ids=[
        "never begun",
        "good",
        "lost",
        "lost for good",
        "a turn is gone",
        "of an invalid one",
        "label unreadable",
        "newest decides",
    ],
)
def test_the_newest_attempt_decides_what_a_restart_does(
    records: list[AttemptSeen], labels: dict, want: SiblingRestored
) -> None:
    assert restore_siblings(1, records, labels, repairs_max=2) == (want,)


def resumed(record: AttemptSeen) -> Resume:
    told = restore_siblings(1, [record], {}, repairs_max=2)[0]
    assert told.resume is not None
    assert told.attempt == record.attempt
    return told.resume


def test_an_attempt_without_a_label_goes_on_after_its_last_finished_turn() -> None:
    record = resumed(seen(1, turns=2))
    assert [t.turn for t in record.turns] == [0, 1]
    assert (record.intent, record.host, record.box, record.broken) == (None, "h0", "b0", "")


def test_a_turns_time_limit_is_that_of_its_intent() -> None:
    assert [t.timeout_s for t in resumed(seen(turns=2)).turns] == [9.0, 9.0]


def test_a_command_that_was_about_to_run_is_kept() -> None:
    assert resumed(seen(turns=1).intended(intent(1))).intent == intent(1)


def test_the_box_is_the_one_that_was_named_last() -> None:
    record = resumed(seen(turns=1).restored(1).in_box("h1", "b1"))
    assert (record.host, record.box, record.replays) == ("h1", "b1", 1)


@pytest.mark.parametrize(
    "record",
    [
        AttemptSeen(0, 0).turned(turn(0)).turned(turn(2)),
        AttemptSeen(0, 0).turned(turn(1)),
        AttemptSeen(0, 0).turned(turn(0)).intended(intent(2)),
    ],
    ids=["middle", "first", "last"],
)
def test_a_gap_in_the_records_is_named(record: AttemptSeen) -> None:
    assert "turn" in resumed(record).broken
