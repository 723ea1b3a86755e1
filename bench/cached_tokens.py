"""Cached tokens of the modelled KV cache against those that a real vLLM engine reports.

    python -m bench.cached_tokens [--quick] [--json PATH|-]

Sends seeded conversations to the engine one request at a time (groups of siblings with one opening;
each turn sends the whole context, with what the engine sampled before; some turns are sent twice)
and does the same with sim/rollout/kv.py, of as many blocks. The KV is so small that caches are
evicted, wholly or in part. Every request must find the same number of cached tokens in both.
Figures: requests; mismatches; evicting: requests that would have found more in an endless cache,
partly: and yet found more than their group's opening.

The model is MUSTER_TEST_MODEL or the bundled one, from MUSTER_CACHE or .muster/cache. Does not
cover: requests that run at the same time (the model decodes a batch's blocks at its steps).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from bench import _results
from muster.model import ensure_model
from muster.types import SamplingParams
from services.inference.adapters.vllm import VllmEngine
from services.inference.config import InferenceConfig
from services.inference.engine import Chunk, Engine, Finish, Sampling
from sim.rollout.chain import Chain
from sim.rollout.kv import PrefixCache

REQUESTS, QUICK = 200, 60
BLOCK = 32
SYSTEM, LONGEST, LIVE, SIBLINGS = 75, 640, 9, 4
WORDS = (1000, 40_000)  # ids of plain words in the vocabulary
NULL_BLOCKS = 1  # vLLM keeps one for itself
CONFIG = InferenceConfig(
    max_model_len=1024, kv_cache_gib=0.032, max_requests=2, threads=1, block_size=BLOCK
)


@dataclass
class Conversation:
    """One sibling: its tokens, and the same as runs."""

    chain: Chain
    tokens: list[int]
    opening: int
    turns: int


@dataclass
class Row:
    """One request: what both caches, and an endless one, had of it."""

    prompt: int
    opening: int
    engine: int
    model: int
    endless: int


@dataclass
class Talks:
    """Seeded conversations, `LIVE` at a time."""

    seed: int
    live: list[Conversation] = field(default_factory=list)
    opened: int = 0

    def __post_init__(self) -> None:
        self.draw = Random(self.seed)
        self._system = self._words(SYSTEM)
        self._opening: list[int] = []

    def _words(self, count: int) -> list[int]:
        return [self.draw.randrange(*WORDS) for _ in range(count)]

    def next(self) -> Conversation:
        """The one whose turn it is; it may be sent again, as a fork of itself."""
        while len(self.live) < LIVE:
            self.live.append(self._open())
        return self.draw.choice(self.live)

    def _open(self) -> Conversation:
        group, sibling = divmod(self.opened, SIBLINGS)
        if sibling == 0:
            # Every other opening ends with a block: of it, siblings lose the last.
            whole = BLOCK - SYSTEM % BLOCK + BLOCK * self.draw.randrange(4)
            self._opening = self._words(whole if group % 2 else self.draw.randrange(20, 130))
        self.opened += 1
        chain = Chain.shared(("system", SYSTEM), (f"group {group}", len(self._opening)))
        tokens = self._system + self._opening
        return Conversation(chain, tokens, len(tokens), self.draw.randrange(3, 9))

    def sampled(self) -> int:
        """Tokens to sample in the next turn."""
        return self.draw.randrange(1, 12)

    def answered(self, talk: Conversation, reply: list[int]) -> None:
        """Goes on with an observation, or again with the same turn, or ends."""
        self.live.remove(talk)
        if self.draw.random() < 0.1:  # sent again: what was sampled is dropped
            self.live.append(Conversation(talk.chain.fork(), talk.tokens, talk.opening, talk.turns))
            return
        observation = self._words(self.draw.randrange(5, 170))
        talk.tokens = talk.tokens + reply + observation
        talk.chain.extend(len(reply) + len(observation))
        talk.turns -= 1
        if talk.turns and len(talk.tokens) < LONGEST:
            self.live.append(talk)


async def compare(engine: Engine, requests: int, seed: int = 1) -> list[Row]:
    """Send that many, one after the other; a row for each."""
    blocks = engine.load().kv_tokens_total // BLOCK - NULL_BLOCKS
    model, endless = PrefixCache(blocks * BLOCK, BLOCK), PrefixCache(1 << 40, BLOCK)
    talks, rows = Talks(seed), list[Row]()
    for number in range(requests):
        talk = talks.next()
        reply, finish = await ask(engine, f"request-{number}", talk.tokens, talks.sampled())
        found = [served(cache, talk.chain, len(reply)) for cache in (model, endless)]
        rows.append(Row(len(talk.tokens), talk.opening, finish.cached_tokens, *found))
        talks.answered(talk, reply)
    return rows


async def ask(
    engine: Engine, name: str, prompt: list[int], sampled: int
) -> tuple[list[int], Finish]:
    """One request, to its end."""
    reply: list[int] = []
    request = Sampling(name, tuple(prompt), SamplingParams(seed=len(prompt)), sampled)
    async for item in engine.sample(request):
        if isinstance(item, Chunk):
            reply += item.token_ids
        else:
            return reply, item
    raise AssertionError("a request ends with a Finish")


def served(cache: PrefixCache, chain: Chain, sampled: int) -> int:
    """The request in the model: tokens found cached. The last sampled one's KV is not computed."""
    hold = cache.admit(chain)
    assert hold is not None, "one request fits"
    kept = chain.tokens + sampled - 1
    assert cache.grow(hold, kept), "one request fits"
    cache.fill(hold, kept)
    cache.release(hold)
    return hold.cached_tokens


@asynccontextmanager
async def real_engine() -> AsyncIterator[VllmEngine]:
    """vLLM on this machine, with little KV."""
    folder = ensure_model(
        os.environ.get("MUSTER_TEST_MODEL", "smollm2-135m-instruct"),
        Path(os.environ.get("MUSTER_CACHE", ".muster/cache")),
    )
    engine = VllmEngine(str(folder), CONFIG)
    await engine.start(0)
    try:
        yield engine
    finally:
        await engine.shutdown()


def figures(rows: list[Row]) -> dict[str, float]:
    """See the module's docstring."""
    evicting = [row for row in rows if row.model < row.endless]
    return {
        "requests": len(rows),
        "mismatches": sum(row.engine != row.model for row in rows),
        "evicting": len(evicting),
        "evicting_partly": sum(row.model > row.opening for row in evicting),
        "cached_tokens": sum(row.engine for row in rows),
        "prompt_tokens": sum(row.prompt for row in rows),
    }


async def measure(requests: int) -> tuple[list[Row], int]:
    """The rows, and the engine's KV in tokens."""
    async with real_engine() as engine:
        return await compare(engine, requests), engine.load().kv_tokens_total


def main() -> None:
    """Print what differs, then the figures."""
    asked = _results.arguments("Cached tokens: model against vLLM")
    requests = QUICK if asked.quick else REQUESTS
    machine = _results.machine()
    rows, kv = asyncio.run(measure(requests))
    for number, row in enumerate(rows):
        if row.engine != row.model:
            print(f"request {number}: {row}")
    found = figures(rows)
    result: dict[str, Any] = {
        "name": "cached_tokens",
        "machine": machine,
        "settings": {"quick": asked.quick, "block": BLOCK, "kv_tokens": kv},
        "figures": found,
        "ratios": {"mismatches_over_requests": found["mismatches"] / found["requests"]},
    }
    _results.publish(result, asked.json)


if __name__ == "__main__":
    main()
