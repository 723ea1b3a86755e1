"""What room a young conversation is given, after others have ended."""

from __future__ import annotations

import pytest

from services.router.growth import Growth
from tests.unit.router.hall import Hall


def test_before_the_first_end_it_is_the_most() -> None:
    assert Growth(25_000).tokens == 25_000


def test_it_comes_to_half_of_what_conversations_end_at() -> None:
    growth = Growth(25_000)
    for _ in range(2000):
        growth.ended(10_000)
    assert growth.tokens == pytest.approx(5_000, rel=0.1)


def test_it_is_never_above_the_most() -> None:
    growth = Growth(25_000)
    for _ in range(2000):
        growth.ended(200_000)
    assert growth.tokens == 25_000


def test_the_first_that_end_are_short_and_count_for_little() -> None:
    growth = Growth(25_000)
    for _ in range(8):
        growth.ended(4_000)
    assert growth.tokens > 20_000


def test_what_ended_long_ago_counts_for_little() -> None:
    growth = Growth(25_000)
    for _ in range(5000):
        growth.ended(4_000)
    for _ in range(1500):
        growth.ended(40_000)
    assert growth.tokens == pytest.approx(20_000, rel=0.1)


def test_small_changes_are_not_told() -> None:
    growth = Growth(25_000)
    told = [growth.ended(10_000) for _ in range(2000)]
    assert 10 < sum(told) < 40


def test_conversations_that_end_small_make_room_for_more() -> None:
    hall = Hall("r", reserve=300)
    for number in range(3):
        hall.begin(f"a{number}")
    assert not hall.seats.has_room(0.0)
    for number in range(100):
        assert hall.seats.over(f"a{number}") == ()
        hall.begin(f"a{number + 3}")
    begun = 0
    while hall.seats.has_room(0.0):
        hall.begin(f"b{begun}")
        begun += 1
    assert begun > 3
