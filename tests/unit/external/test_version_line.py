"""Numbers of versions, and how often a replica that fails is tried."""

from __future__ import annotations

from itertools import pairwise

import pytest

from muster.errors import Refused
from muster.version_line import LOOKS_MAX, Known, Tries, VersionLine


def test_a_number_is_never_used_twice() -> None:
    line = VersionLine({0: Known(-1, "a"), 7: Known(3, "b")}, 0, "a")
    assert line.seal() == (8, 0)
    assert line.seal() == (9, 0)  # the first came to nothing


def test_a_number_that_a_replica_serves_is_used_though_its_record_is_lost() -> None:
    line = VersionLine({0: Known(-1, "a")}, 0, "a", served=1)
    assert line.seal() == (2, 0)


def test_a_version_comes_from_the_one_before() -> None:
    line = VersionLine({}, 0, "a")
    version, _ = line.seal()
    line.sealed(version, "b")
    assert (line.current, line.digest, line.seal()) == (1, "b", (2, 1))


def test_other_weights_under_a_known_number_are_refused() -> None:
    with pytest.raises(Refused, match="with other weights"):
        VersionLine({0: Known(-1, "a")}, 0, "b")


def test_who_keeps_failing_is_tried_ever_more_seldom() -> None:
    tries, tried = Tries(), []
    for look in range(40):
        if "r" not in tries.look():
            tried.append(look)
            tries.took([("r", False)])
    gaps = [b - a for a, b in pairwise(tried)]
    assert gaps[:4] == [1, 2, 4, 8]
    assert set(gaps[4:]) == {LOOKS_MAX}


def test_who_took_it_or_has_a_new_version_to_take_is_tried_at_once() -> None:
    tries = Tries()
    tries.took([("r", False)])
    tries.took([("r", False)])
    assert tries.look() == ["r"]
    tries.forget()
    assert tries.look() == []
    tries.took([("r", False)])
    tries.took([("r", True)])
    assert tries.look() == []


def test_failures_are_told_at_tries_1_2_4_8() -> None:
    tries = Tries()
    told = [bool(tries.took([("r", False)])) for _ in range(8)]
    assert told == [True, True, False, True, False, False, False, True]
