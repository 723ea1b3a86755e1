"""What the fake engine finds in its prefix cache."""

from __future__ import annotations

import pytest

from muster.types import SamplingParams
from services.inference.adapters.fake import FakeEngine, Script
from services.inference.adapters.fake_cache import PrefixCache
from services.inference.engine import Finish, Sampling

CONTEXT = tuple(range(100, 140))


def cache(tokens: int = 1000) -> PrefixCache:
    return PrefixCache(tokens, 8)


@pytest.mark.parametrize(
    ("context", "found"),
    [
        (CONTEXT, 32),  # the last token is computed anyway, so its block is too
        ((*CONTEXT, 1), 40),
        (CONTEXT[:20], 16),
        ((*CONTEXT[:20], 7, 7, 7, 7, 7), 16),
        ((7, *CONTEXT), 0),
    ],
)
def test_whole_blocks_of_a_shared_beginning_are_found(context: tuple[int, ...], found: int) -> None:
    known = cache()
    known.take(CONTEXT)
    assert known.cached(context) == found


def test_the_oldest_goes_first_and_of_one_context_its_end() -> None:
    known = cache(tokens=56)
    known.take(CONTEXT)
    known.take(tuple(range(500, 532)))
    assert known.cached((*CONTEXT, 1)) == 24
    assert known.cached((*range(500, 532), 1)) == 32


async def cached(engine: FakeEngine, prompt: tuple[int, ...]) -> int:
    request = Sampling("a", prompt, SamplingParams(), max_tokens=8)
    [finish] = [item async for item in engine.sample(request) if isinstance(item, Finish)]
    return finish.cached_tokens


async def test_siblings_share_their_prompt_and_a_turn_continues_the_former_one() -> None:
    reply = tuple(range(1, 9))
    engine = FakeEngine(Script(replies=(reply,), block=8))
    await engine.start(0)
    assert await cached(engine, CONTEXT) == 0
    assert await cached(engine, CONTEXT) == 32
    assert await cached(engine, (*CONTEXT, *reply, 5)) == 48


async def test_another_version_empties_the_cache() -> None:
    engine = FakeEngine(Script(block=8))
    await engine.start(0)
    await cached(engine, CONTEXT)
    engine.follow(1)
    assert await cached(engine, CONTEXT) == 0


async def test_steps_are_counted_and_the_cache_is_what_it_grants() -> None:
    engine = FakeEngine(Script(kv_tokens=4096))
    await engine.start(0)
    await cached(engine, CONTEXT)
    load = engine.load()
    assert (load.steps, load.kv_tokens_total) == (8, 4096)
