"""Nobody serves a version before enough hold it."""

from __future__ import annotations

import pytest

from muster.errors import Unavailable
from muster.transfer.quorum import Quorum


async def test_without_a_quorum_nobody_waits() -> None:
    await Quorum(3, 0.0).wait()


async def test_enough_is_enough() -> None:
    quorum = Quorum(4, 0.5)
    quorum.holds("a")
    quorum.fails("b")
    quorum.holds("c")
    await quorum.wait()


async def test_too_few_is_none() -> None:
    quorum = Quorum(3, 0.67)
    quorum.holds("a")
    for name in ("b", "c"):
        quorum.fails(name)
    with pytest.raises(Unavailable, match="1 replicas hold the version, 3 are needed"):
        await quorum.wait()


async def test_a_replica_speaks_once() -> None:
    """One that held it and is lost at the commit was counted; one that failed twice is one."""
    quorum = Quorum(2, 1.0)
    quorum.holds("a")
    quorum.fails("a")
    quorum.holds("b")
    await quorum.wait()


@pytest.mark.parametrize(("replicas", "share", "needed"), [(3, 1.0, 3), (10, 0.3, 3), (1, 0.1, 1)])
async def test_shares_are_rounded_up(replicas: int, share: float, needed: int) -> None:
    quorum = Quorum(replicas, share)
    for number in range(needed - 1):
        quorum.holds(f"r{number}")
    for number in range(needed - 1, replicas):
        quorum.fails(f"r{number}")
    with pytest.raises(Unavailable):
        await quorum.wait()


async def test_those_that_serve_it_already_hold_it() -> None:
    """A resend to one of four: it need not be alone a quorum, nor do its failures make one."""
    await Quorum(4, 0.75, holding=3).wait()
    quorum = Quorum(4, 0.75, holding=1)
    quorum.holds("late")
    for name in ("b", "c"):
        quorum.fails(name)
    with pytest.raises(Unavailable, match="2 replicas hold the version, 3 are needed"):
        await quorum.wait()
