"""Placement by predicted finish: what a turn is thought to take, and when a move pays."""

from __future__ import annotations

import pytest

from services.router.costs import Costs
from services.router.placements import Choice, PredictedFinish, ReplicaView, TurnRequest

COSTS = Costs()
POLICY = PredictedFinish(COSTS)


def choose(request: TurnRequest, *fleet: ReplicaView) -> Choice:
    return POLICY.choose(request, fleet)


def turn(home: str = "a", context: int = 20_000, expected: int = 200) -> TurnRequest:
    return TurnRequest("e", "g", home, context, expected)


def view(id_: str, in_flight: int = 0, cached: int = 0, **more: float) -> ReplicaView:
    """In flight: others of 20,000 tokens each, all that are at home there."""
    about: dict[str, float] = {
        "sessions": in_flight,
        "running_tokens": in_flight * 20_000,
        "load_tokens": in_flight * 20_000,
        "queued_tokens": in_flight * 1_000,
        **more,
    }
    return ReplicaView(id=id_, in_flight=in_flight, cached_tokens=cached, **about)  # type: ignore[arg-type]


def home(in_flight: int = 0, cached: int = 0, **more: float) -> ReplicaView:
    """The same with the asking conversation at home there."""
    mine = {"sessions": in_flight + 1, "load_tokens": (in_flight + 1) * 20_000}
    return view("a", in_flight, cached, **{**mine, "group_sessions": 1, **more})


def test_an_idle_home_takes_the_prefill_and_the_steps_of_nine_replies() -> None:
    choice = choose(turn(), home(cached=19_000))
    want = COSTS.prefill_s(1_000) + 9 * 200 * COSTS.step_s(1, 20_000)
    assert choice.terms == {"a": pytest.approx(want)}


def test_a_reply_of_unknown_length_is_taken_for_256_tokens() -> None:
    choice = choose(turn(expected=0), home(cached=20_000))
    want = COSTS.prefill_s(0) + 9 * 256 * COSTS.step_s(1, 20_000)
    assert choice.terms["a"] == pytest.approx(want)


def test_later_turns_meet_those_that_are_at_home_now_in_their_tools() -> None:
    busy = view("a", in_flight=1)
    waiting = view("b", in_flight=1, sessions=9, load_tokens=180_000)
    assert choose(turn(home=""), busy, waiting).replica == "a"


def test_siblings_are_spread_when_nothing_else_tells_replicas_apart() -> None:
    with_siblings = view("a", in_flight=4, group_sessions=3)
    without = view("b", in_flight=4)
    assert choose(turn(home=""), with_siblings, without).replica == "b"


@pytest.mark.parametrize(
    "worse",
    [
        view("b", in_flight=1),  # queue, slower steps, others delayed
        view("b", slow=1.5),
        view("b", distance_s=0.2),
        view("b", credit_tokens=30_000, load_tokens=29_000),  # its cache would overflow
    ],
)
def test_whatever_makes_a_replica_worse_counts(worse: ReplicaView) -> None:
    choice = choose(turn(home=""), worse, view("c"))
    assert (choice.replica, choice.reason) == ("c", "soonest")
    assert choice.terms["b"] > choice.terms["c"]


def test_a_conversation_stays_at_its_cache_though_another_is_less_busy() -> None:
    choice = choose(turn(), home(in_flight=3, cached=19_500), view("b", in_flight=2))
    assert (choice.replica, choice.reason) == ("a", "sticky")


def test_it_moves_when_waiting_at_home_takes_longer_than_the_prefill_elsewhere() -> None:
    choice = choose(turn(), home(in_flight=20, cached=19_500), view("b"))
    assert (choice.replica, choice.reason) == ("b", "moved")


def test_a_gain_that_does_not_pay_for_the_double_work_moves_nobody() -> None:
    here, there = home(cached=3_000, slow=1.2), view("b", cached=2_500)
    choice = choose(turn(context=20_000), here, there)
    assert choice.terms["a"] > choice.terms["b"]
    assert (choice.replica, choice.reason) == ("a", "sticky")


def test_a_move_is_free_right_after_the_caches_were_cleared() -> None:
    choice = choose(turn(), home(in_flight=3), view("b", in_flight=2))
    assert (choice.replica, choice.reason) == ("b", "nothing_cached_at_home")


def test_siblings_go_where_their_prompt_is() -> None:
    first = choose(turn(home="", context=3_000), view("a", in_flight=1), view("b", in_flight=1))
    there = view("b", in_flight=1, cached=2_900)
    second = choose(turn(home="", context=3_000), view("a", in_flight=1), there)
    assert (first.replica, second.replica) == ("a", "b")


def test_a_full_cache_takes_no_more_than_it_must() -> None:
    full = view("a", in_flight=4, credit_tokens=100_000, load_tokens=96_000, cached=1_800)
    choice = choose(turn(home=""), full, view("b", in_flight=4, cached=1_800))
    assert choice.replica == "b"


def test_a_home_that_left_gives_a_new_one() -> None:
    choice = choose(turn(home="gone"), view("b"), view("a"))
    assert (choice.replica, choice.reason) == ("a", "rehomed")


def test_golden_decisions_of_a_group_of_four_turn_by_turn() -> None:
    """Two replicas; loads and caches grow as the decisions say."""
    in_flight, cached = {"a": 0, "b": 0}, {"a": 0, "b": 0}
    told = []
    for n in range(4):
        fleet = (view("a", in_flight["a"], cached["a"]), view("b", in_flight["b"], cached["b"]))
        choice = choose(TurnRequest(f"g-{n}", "g", "", 3_000, 200), *fleet)
        in_flight[choice.replica] += 1
        cached[choice.replica] = 2_944
        told.append(choice.replica)
    assert told == ["a", "b", "a", "b"]
