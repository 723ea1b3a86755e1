"""In which order callers wait for a box."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.types import EpisodeKey
from services.sandbox.events import Asked
from services.sandbox.waiting import Waiting


def asked(ticket: int, since: float) -> Asked:
    return Asked(ticket, EpisodeKey("r", "g", ticket, 1, 1), 0.0, since=since)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30))
def test_it_is_a_list_sorted_by_who_waits_for_longest(calls: list[tuple[int, bool]]) -> None:
    """Against an oracle: sort whatever is there, at every step."""
    waiting, oracle = Waiting(), list[Asked]()
    for ticket, (since, served) in enumerate(calls):
        if served and oracle:
            first = next(iter(waiting))
            assert first == oracle.pop(0)
            waiting.drop(first.ticket)
        one = asked(ticket, float(since))
        waiting.add(one)
        oracle = sorted([*oracle, one], key=lambda a: (a.since, a.ticket))
        assert ([*waiting], len(waiting)) == (oracle, len(oracle))


def test_who_is_met_may_be_dropped() -> None:
    waiting = Waiting()
    for ticket in range(4):
        waiting.add(asked(ticket, 0.0))
    for one in waiting:
        waiting.drop(one.ticket)
        waiting.drop(one.ticket)
    assert not len(waiting)
