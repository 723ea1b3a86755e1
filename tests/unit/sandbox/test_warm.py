"""How many boxes should stand ready: from who asked of late."""

from __future__ import annotations

from muster.types import EpisodeKey, Limits
from services.sandbox.warm import Demand, Kind

KIND, OTHER = Kind("content", Limits()), Kind("other", Limits())


def key(sibling: int, group: str = "g", run: str = "r") -> EpisodeKey:
    return EpisodeKey(run, group, sibling, 1, 1)


def test_nothing_is_wanted_of_what_nobody_asked_for() -> None:
    demand = Demand()
    demand.made(KIND, 1.0)
    assert demand.wanted(0.0) == {}


def test_as_many_as_are_likely_to_be_asked_for_while_one_is_made() -> None:
    demand = Demand()
    for number in range(20):  # two in a second, each of which takes three to make
        demand.asked(KIND, key(0, f"g{number}"), number / 2)
    demand.made(KIND, 3.0)
    assert demand.wanted(9.5) == {KIND: 6}


def test_the_siblings_of_a_group_that_began_are_expected() -> None:
    demand = Demand()
    for sibling in range(8):
        demand.asked(OTHER, key(sibling, "first"), 0.0)
    demand.asked(KIND, key(3, "second"), 20.0)
    assert demand.wanted(20.0) == {KIND: 7}
    demand.asked(KIND, key(4, "second"), 21.0)
    assert demand.wanted(21.0) == {KIND: 6}


def test_a_group_of_another_run_tells_nothing() -> None:
    demand = Demand()
    demand.asked(OTHER, key(7, run="wide"), 0.0)
    demand.asked(KIND, key(0, run="narrow"), 0.0)
    assert KIND not in demand.wanted(0.0)


def test_what_nobody_asks_for_any_more_is_not_wanted() -> None:
    demand = Demand()
    demand.asked(KIND, key(1), 0.0)
    demand.made(KIND, 1.0)
    assert demand.wanted(10.0) == {KIND: 1}
    assert demand.wanted(10.1) == {}


def test_the_tables_are_bounded() -> None:
    demand = Demand()
    for number in range(2000):
        kind = Kind(f"c{number}", Limits())
        demand.asked(kind, key(1, f"g{number}", f"r{number}"), 0.0)
    assert len(demand.wanted(0.0)) <= 128
    assert len(demand._groups) <= 256
    assert len(demand._sizes) <= 256
