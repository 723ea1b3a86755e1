"""Evaluation and training share the launches."""

from __future__ import annotations

import pytest

from services.router.order import Place
from services.router.shares import Launches

MANY = 400


def skip(place: Place) -> bool:
    return False


def filled(launches: Launches, *, training: int = 0, evaluation: int = 0) -> None:
    for number in range(training):
        launches.of(f"t{number}", evaluates=False).fresh((f"t{number}", 0), (0, number))
    for number in range(evaluation):
        launches.of(f"e{number}", evaluates=True).fresh((f"e{number}", 0), (0, number))


def launched(launches: Launches, most: int, **of: int) -> str:
    """Who was launched, a letter each; what is launched runs on."""
    said, running = "", of.get("evaluating", 0)
    for _ in range(most):
        place = launches.next(skip, evaluating=running, training_runs=bool(of.get("trains", 1)))
        if place is None:
            break
        launches.launched(place)
        said += place[0][0]
        running += place[0][0] == "e"
    return said


@pytest.mark.parametrize("share", [0.25, 0.5, 0.1])
def test_while_both_wait_each_gets_its_share_at_any_time(share: float) -> None:
    launches = Launches(8, share, most=10 * MANY)
    filled(launches, training=MANY, evaluation=MANY)
    said = launched(launches, MANY)
    for count in range(1, MANY + 1):
        assert abs(said[:count].count("e") - share * count) <= 1


def test_one_place_at_a_time_starves_neither() -> None:
    launches = Launches(8, 0.25, most=1)
    filled(launches, training=40, evaluation=40)
    said = ""
    for _ in range(20):  # each ends before the next begins
        place = launches.next(skip, evaluating=0, training_runs=True)
        assert place is not None
        launches.launched(place)
        said += place[0][0]
    assert (said.count("e"), said.count("t")) == (5, 15)


def test_whoever_waits_alone_is_launched() -> None:
    launches = Launches(8, 0.25, most=1000)
    filled(launches, training=3)
    assert launched(launches, 9) == "ttt"
    filled(launches, evaluation=3)
    assert launched(launches, 9) == "eee"
    assert not launches


def test_while_a_training_job_runs_an_evaluation_leaves_most_places_to_it() -> None:
    launches = Launches(8, 0.25, most=8)
    filled(launches, evaluation=9)
    assert launched(launches, 9) == "ee"
    assert launched(launches, 9, evaluating=1) == "e"
    assert launched(launches, 9, evaluating=0, trains=0) == "e" * 6


def test_what_a_former_router_left_goes_first_whatever_it_is_of() -> None:
    launches = Launches(8, 0.25, most=4)
    filled(launches, training=2, evaluation=2)
    launches.of("e9", evaluates=True).resume(("e9", 1))
    launches.of("t9", evaluates=False).resume(("t9", 1))
    assert launches.resuming == 2
    assert launched(launches, 2, evaluating=4) == "te"
    assert launches.resuming == 0


def test_while_one_that_was_left_waits_for_its_host_the_shares_hold() -> None:
    """Of either kind, and the other kind's that could go on is not kept waiting."""
    for kind in "te":
        other = "et"[kind == "e"]
        launches = Launches(8, 0.25, most=8)
        launches.of(f"{kind}9", evaluates=kind == "e").resume((f"{kind}9", 1))
        launches.of(f"{other}8", evaluates=other == "e").resume((f"{other}8", 1))
        filled(launches, training=MANY, evaluation=MANY)
        said, running = "", 0
        for _ in range(9):
            place = launches.next(
                lambda at, waits=f"{kind}9": at[0] == waits, evaluating=running, training_runs=True
            )
            assert place is not None
            launches.launched(place)
            said += place[0][0]
            running = min(1, said.count("e"))
        assert said[0] == other
        assert said[1:].count("e") == 2
        assert launches.resuming == 1


def test_a_dropped_group_is_launched_no_more() -> None:
    launches = Launches(8, 0.25, most=4)
    filled(launches, training=1, evaluation=1)
    launches.drop("e0")
    assert [*launches] == [("t0", 0)]
    assert len(launches) == 1
