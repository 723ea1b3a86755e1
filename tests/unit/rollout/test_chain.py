"""Chains share the tokens of their common runs, and no others."""

from __future__ import annotations

from sim.rollout.chain import Chain
from sim.rollout.kv import PrefixCache


def found(first: Chain, second: Chain) -> int:
    """Tokens of the second that a cache of single tokens has after the first."""
    cache = PrefixCache(1000, 1)
    hold = cache.admit(first)
    assert hold is not None
    cache.fill(hold, first.tokens)
    cache.release(hold)
    return cache.match(second, second.tokens + 1)


def test_siblings_share_their_named_runs_and_not_their_own() -> None:
    one, other = (Chain.shared(("system", 20), ("group", 10)) for _ in range(2))
    one.extend(5)
    other.extend(5)

    assert one.tokens == 35
    assert found(one, other) == 30
    assert found(one, one) == 35


def test_other_groups_share_only_the_system() -> None:
    one = Chain.shared(("system", 20), ("group-1", 10))
    other = Chain.shared(("system", 20), ("group-2", 10))

    assert found(one, other) == 20


def test_the_same_name_after_something_else_is_something_else() -> None:
    one, other = Chain.shared(("a", 5), ("c", 5)), Chain.shared(("b", 5), ("c", 5))

    assert found(one, other) == 0


def test_a_fork_shares_what_there_was_and_then_goes_its_own_way() -> None:
    chain = Chain.shared(("system", 20))
    chain.extend(7)
    fork = chain.fork()
    chain.extend(4)
    fork.extend(4)

    assert (chain.tokens, fork.tokens) == (31, 31)
    assert found(chain, fork) == found(fork, chain) == 27
