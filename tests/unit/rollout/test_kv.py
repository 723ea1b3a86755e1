"""The rules of a paged prefix cache, one by one, in blocks of ten tokens."""

from __future__ import annotations

import pytest

from muster.errors import InvalidInput, Refused
from sim.rollout.chain import Chain
from sim.rollout.kv import Hold, PrefixCache


def chain(tokens: int) -> Chain:
    made = Chain([])
    made.extend(tokens)
    return made


def held(cache: PrefixCache, prompt: Chain) -> Hold:
    """The prompt, computed."""
    hold = cache.admit(prompt)
    assert hold is not None
    cache.fill(hold, prompt.tokens)
    return hold


def served(cache: PrefixCache, prompt: Chain) -> int:
    """A request that samples one token: what it found."""
    hold = held(cache, prompt)
    cache.release(hold)
    return hold.cached_tokens


def test_only_full_blocks_are_found() -> None:
    cache, prompt = PrefixCache(1000, 10), chain(37)
    served(cache, prompt)
    prompt.extend(100)
    assert cache.match(prompt) == 30


def test_a_wholly_cached_prompt_of_whole_blocks_loses_one() -> None:
    cache, prompt = PrefixCache(1000, 10), chain(40)
    served(cache, prompt)
    assert cache.match(prompt) == 30


def test_a_recomputed_block_is_a_copy() -> None:
    """Two blocks with the same content: the first stays found until both are gone."""
    cache, prompt = PrefixCache(60, 10), chain(40)
    served(cache, prompt)
    served(cache, prompt)  # its fourth block anew: five have content
    other = cache.admit(chain(20))  # one blank, and the older fourth
    assert other is not None
    assert cache.match(prompt, 41) == 40


def test_tails_go_before_heads() -> None:
    cache, prompt = PrefixCache(60, 10), chain(40)
    served(cache, prompt)
    assert cache.admit(chain(40)) is not None
    assert cache.match(prompt, 41) == 20


def test_the_least_recently_freed_goes_first() -> None:
    cache, old, new = PrefixCache(60, 10), chain(30), chain(30)
    served(cache, old)
    served(cache, new)
    served(cache, old)
    assert cache.admit(chain(30)) is not None
    assert (cache.match(old, 31), cache.match(new, 31)) == (30, 0)


def test_blank_blocks_go_before_any_content() -> None:
    cache, prompt = PrefixCache(60, 10), chain(30)
    served(cache, prompt)
    abandoned = cache.admit(chain(30))
    assert abandoned is not None
    cache.release(abandoned)  # nothing was computed
    assert cache.admit(chain(30)) is not None
    assert cache.match(prompt, 31) == 30


def test_what_a_request_holds_is_not_evicted() -> None:
    cache, one = PrefixCache(60, 10), chain(30)
    held(cache, one)
    assert cache.admit(chain(40)) is None
    assert cache.admit(chain(30)) is not None
    assert cache.free == 0
    assert cache.match(one, 31) == 30


def test_a_shared_prefix_is_held_until_the_last_lets_go() -> None:
    cache = PrefixCache(100, 10)
    first, second = (Chain.shared(("system", 40)) for _ in range(2))
    first.extend(10)
    second.extend(10)
    one, two = held(cache, first), held(cache, second)
    assert cache.used == 6  # four, and one each

    cache.release(one)
    assert cache.used == 5
    cache.release(two)
    assert cache.used == 0


def test_idle_blocks_that_a_prompt_finds_count_as_taken() -> None:
    """They are free, but it cannot have them and evict them."""
    cache, prompt = PrefixCache(50, 10), chain(30)
    served(cache, prompt)
    prompt.extend(25)
    assert cache.admit(prompt) is None
    assert cache.admit(prompt, 50) is not None


def test_growth_takes_a_block_when_the_last_is_full() -> None:
    cache = PrefixCache(40, 10)
    hold = held(cache, chain(30))
    assert cache.grow(hold, 40)
    assert cache.free == 0
    assert not cache.grow(hold, 41)


def test_a_clear_forgets_everything_but_not_under_a_request() -> None:
    cache, prompt = PrefixCache(60, 10), chain(30)
    hold = held(cache, prompt)
    with pytest.raises(Refused):
        cache.clear()
    cache.release(hold)
    cache.clear()
    assert cache.match(prompt, 31) == 0
    assert cache.free == 6


def test_content_without_blocks_is_refused() -> None:
    cache = PrefixCache(60, 10)
    hold = held(cache, chain(30))
    with pytest.raises(Refused):
        cache.fill(hold, 40)


def test_a_cache_of_no_block_is_refused() -> None:
    with pytest.raises(InvalidInput):
        PrefixCache(9, 10)
