"""Which sibling is launched next."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from services.router.order import LaunchOrder, Place


def opened(order: LaunchOrder, *groups: str, size: int = 2) -> None:
    """Groups of one job, in the order of their names."""
    for group in groups:
        for number in range(size):
            order.fresh((group, number), (0, int.from_bytes(group.encode())))


def launches(order: LaunchOrder, most: int = 99, *, paused: str = "") -> str:
    """Launch what comes next, so often; their names in a row."""
    found: list[str] = []
    while len(found) < most and (place := order.next(lambda p: p[0] in paused)) is not None:
        order.launched(place)
        found.append(f"{place[0]}{place[1]}")
    return " ".join(found)


def test_siblings_of_a_block_take_turns_and_blocks_follow_each_other() -> None:
    order = LaunchOrder(2)
    opened(order, "a", "b", "c")
    assert launches(order) == "a0 b0 a1 b1 c0 c1"


def test_a_group_that_is_opened_later_joins_a_block_with_room_and_catches_up() -> None:
    order = LaunchOrder(2)
    opened(order, "a", size=3)
    assert launches(order, 2) == "a0 a1"
    opened(order, "b", "c", size=3)
    assert launches(order) == "b0 b1 a2 b2 c0 c1 c2"


def test_groups_are_launched_by_rank_in_whatever_order_they_came() -> None:
    order = LaunchOrder(1)
    opened(order, "d", "b", "a", "c", size=1)
    assert launches(order, 2) == "a0 b0"
    order.fresh(("z", 0), (1, 0))  # a later job's first
    opened(order, "e")
    assert launches(order) == "c0 d0 e0 e1 z0"


@given(st.permutations(range(12)), st.integers(1, 5), st.integers(1, 4))
def test_the_order_in_which_groups_came_changes_nothing(
    came: list[int], interleave: int, size: int
) -> None:
    asked, sorted_ = LaunchOrder(interleave), LaunchOrder(interleave)
    for order, groups in ((asked, came), (sorted_, range(12))):
        for group in groups:
            for number in range(size):
                order.fresh((str(group), number), divmod(group, 5))
    assert list(asked) == list(sorted_)
    assert launches(asked) == launches(sorted_)
    assert not asked


def test_what_a_former_router_left_comes_first_then_repairs() -> None:
    order = LaunchOrder(2)
    opened(order, "a", size=1)
    order.repair(("b", 3))
    order.resume(("c", 5))
    assert launches(order) == "c5 b3 a0"


def test_a_paused_job_stands_aside_and_loses_no_place() -> None:
    order = LaunchOrder(2)
    opened(order, "a", "b", "c", size=2)
    order.repair(("a", 7))
    assert launches(order, 3, paused="a") == "b0 c0 b1"
    assert launches(order) == "a7 c1 a0 a1"


def test_nothing_of_a_dropped_group_is_launched() -> None:
    order = LaunchOrder(2)
    opened(order, "a", "b")
    order.repair(("a", 5))
    order.resume(("a", 6))
    assert launches(order, 1) == "a6"
    order.drop("a")
    assert launches(order) == "b0 b1"
    assert not order


def test_every_group_is_served_however_many_follow_it() -> None:
    chance, order = random.Random(1), LaunchOrder(3)
    opened(order, "g000", size=4)
    waits: dict[str, int] = {"g000": 0}  # group → launches since it was opened
    made, worst = 1, 0
    for _ in range(600):
        if chance.random() < 0.25:  # one in four, of four siblings each: as many as are launched
            opened(order, f"g{made:03}", size=4)
            waits[f"g{made:03}"], made = 0, made + 1
        before = len(order)
        place: Place | None = order.next(lambda _: False)
        if place is None:
            continue
        order.launched(place)
        assert len(order) == before - 1
        waits.pop(place[0], None)
        ahead = {group for group, _ in order} | {place[0]}
        waits = {group: launches + 1 for group, launches in waits.items()}
        worst = max([worst, *(waits[g] - 4 * len(ahead) for g in waits)])
    assert worst <= 4 * 6  # at most those before it, and the block that it stands in
