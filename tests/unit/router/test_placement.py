"""Placement and admission: the small decisions."""

from __future__ import annotations

import pytest

from services.router.admission import open_groups_max
from services.router.events import Host, Replica
from services.router.fleet import Fleet
from services.router.policy import Placement, PlacementRequest, ReplicaView


def view(id_: str, in_flight: int, sessions: int = 0, *, suspect: bool = False) -> ReplicaView:
    return ReplicaView(id_, in_flight, sessions, suspect)


@pytest.mark.parametrize(
    ("home", "fleet", "want"),
    [
        ("", [view("a", 3), view("b", 1)], ("b", "least_loaded")),
        ("", [view("b", 1, 2), view("a", 1, 5)], ("b", "least_loaded")),
        ("", [view("b", 1), view("a", 1)], ("a", "least_loaded")),
        ("a", [view("a", 8), view("b", 1)], ("a", "sticky")),
        ("a", [view("a", 9), view("b", 1)], ("b", "moved")),
        ("a", [view("a", 20), view("b", 12)], ("a", "sticky")),
        ("a", [view("a", 0, suspect=True), view("b", 5)], ("b", "rehomed")),
        ("a", [view("a", 0, suspect=True)], ("a", "sticky")),
        ("gone", [view("b", 5)], ("b", "rehomed")),
        ("a", [], ("", "no_replica")),
    ],
)
def test_sticky_least_loaded(home: str, fleet: list[ReplicaView], want: tuple[str, str]) -> None:
    choice = Placement(8, 2.0).choose(PlacementRequest("e", home, 0), tuple(fleet))
    assert (choice.replica, choice.reason) == want


def test_a_departed_replica_takes_its_counts_along() -> None:
    fleet = Fleet(Placement())
    fleet.replicas_are((Replica("a", ""), Replica("b", "")))
    first = fleet.place("e", 0, 0.0).replica
    other = "b" if first == "a" else "a"
    fleet.replicas_are((Replica(other, ""),))
    assert fleet.place("e", 0, 0.0).replica == other
    fleet.replicas_are((Replica("a", ""), Replica("b", "")))
    fleet.session_over("e")
    assert fleet.place("new", 0, 0.0).replica == first


def test_hosts_share_boxes_and_a_failed_one_is_avoided_for_a_while() -> None:
    fleet = Fleet(Placement(), suspect_s=2.0)
    assert fleet.pick_host(0.0) == ""
    fleet.hosts_are((Host("x", ""), Host("y", "")))
    assert [fleet.pick_host(0.0) for _ in range(4)] == ["x", "y", "x", "y"]
    fleet.host_failed("y", 0.0)
    assert [fleet.pick_host(1.0) for _ in range(2)] == ["x", "x"]
    assert fleet.pick_host(2.5) == "y"


def test_a_new_box_for_a_lost_one_is_had_elsewhere_while_there_is_an_elsewhere() -> None:
    fleet = Fleet(Placement())
    fleet.hosts_are((Host("x", ""), Host("y", "")))
    assert [fleet.pick_host(0.0, avoid="x") for _ in range(3)] == ["y"] * 3
    fleet.host_failed("y", 0.0)
    assert fleet.pick_host(1.0, avoid="x") == "y"
    fleet.hosts_are((Host("x", ""),))
    assert fleet.pick_host(0.0, avoid="x") == "x"


def test_an_episode_that_is_new_here_starts_at_the_home_that_its_records_name() -> None:
    fleet = Fleet(Placement())
    fleet.replicas_are((Replica("a", ""), Replica("b", "")))
    assert fleet.place("e", 10, 0.0, home="b").replica == "b"
    assert fleet.place("e", 10, 0.0, home="a").replica == "b"  # here it has one by now


@pytest.mark.parametrize(
    ("lag", "version", "steps", "want"),
    [(0, 0, 0, 4), (0, 0, 1, 0), (0, 1, 1, 4), (2, 5, 5, 12), (2, 5, 6, 8), (0, 0, 5, 0)],
)
def test_the_bound_counts_whole_batches(lag: int, version: int, steps: int, want: int) -> None:
    got = open_groups_max(
        lag_max=lag, published_step=version, steps_trained=steps, groups_per_batch=4
    )
    assert got == want
