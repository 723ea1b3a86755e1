"""Hosts of boxes, and the bound on open groups: the small decisions."""

from __future__ import annotations

import pytest

from services.router.admission import open_groups_max
from services.router.events import Host
from services.router.hosts import Hosts


def test_hosts_share_boxes_and_a_failed_one_is_avoided_for_a_while() -> None:
    hosts = Hosts(suspect_s=2.0)
    assert hosts.pick(0.0).host == ""
    hosts.listed((Host("x", ""), Host("y", "")))
    assert [hosts.pick(0.0).host for _ in range(4)] == ["x", "y", "x", "y"]
    hosts.failed("y", 0.0)
    assert [hosts.pick(1.0).host for _ in range(2)] == ["x", "x"]
    assert hosts.pick(2.5).host == "y"


def test_a_new_box_for_a_lost_one_is_had_elsewhere_while_there_is_an_elsewhere() -> None:
    hosts = Hosts()
    hosts.listed((Host("x", ""), Host("y", "")))
    assert [hosts.pick(0.0, avoid="x").host for _ in range(3)] == ["y"] * 3
    hosts.failed("y", 0.0)
    assert hosts.pick(1.0, avoid="x").host == "y"
    hosts.listed((Host("x", ""),))
    assert hosts.pick(0.0, avoid="x").host == "x"


@pytest.mark.parametrize(
    ("lag", "version", "steps", "want"),
    [(0, 0, 0, 4), (0, 0, 1, 0), (0, 1, 1, 4), (2, 5, 5, 12), (2, 5, 6, 8), (0, 0, 5, 0)],
)
def test_the_bound_counts_whole_batches(lag: int, version: int, steps: int, want: int) -> None:
    got = open_groups_max(
        lag_max=lag, published_step=version, steps_trained=steps, groups_per_batch=4
    )
    assert got == want
