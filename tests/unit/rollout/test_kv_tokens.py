"""Runs stand for tokens: a cache of true token ids, block by block, finds what the cache of runs
finds, on the conversations that the benchmark sends to a real engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from random import Random

from bench.cached_tokens import BLOCK, NULL_BLOCKS, compare, figures
from muster.types import FinishReason
from services.inference.adapters.fake import FakeEngine, Script
from services.inference.engine import Chunk, Finish, Load, Sampling

KV_TOKENS = 1472  # what the benchmark's budget comes to


class TokenEngine(FakeEngine):
    """Replies at random; its cache is an LRU of blocks named by all tokens up to their end."""

    def __init__(self) -> None:
        super().__init__(Script())
        self.blank = KV_TOKENS // BLOCK - NULL_BLOCKS
        # (when cached, tokens), the least recently freed first. Equal tokens may be there twice.
        self.blocks: list[tuple[int, tuple[int, ...]]] = []
        self.cached = 0
        self.draw = Random(0)

    def load(self) -> Load:
        return Load(kv_tokens_total=KV_TOKENS)

    async def sample(self, request: Sampling) -> AsyncGenerator[Chunk | Finish, None]:
        reply = tuple(self.draw.randrange(1000) for _ in range(request.max_tokens))
        cached = self.serve(request.prompt, (*request.prompt, *reply)[:-1])
        yield Chunk(reply, (0.0,) * len(reply))
        yield Finish(FinishReason.LENGTH, (), cached_tokens=cached)

    def serve(self, prompt: tuple[int, ...], kept: tuple[int, ...]) -> int:
        held = []
        for end in range(BLOCK, len(prompt), BLOCK):
            copies = [block for block in self.blocks if block[1] == prompt[:end]]
            if not copies:
                break
            self.blocks.remove(min(copies))
            held.append(min(copies))
        cached = len(held) * BLOCK
        for end in range(cached + BLOCK, len(kept) + BLOCK, BLOCK):
            if self.blank:
                self.blank -= 1
            else:
                self.blocks.pop(0)
            if end > len(kept):
                self.blank += 1
            else:
                self.cached += 1
                held.append((self.cached, kept[:end]))
        self.blocks += reversed(held)
        return cached


async def test_runs_find_what_true_tokens_find() -> None:
    rows = await compare(TokenEngine(), 200)

    found = figures(rows)
    assert [row for row in rows if row.engine != row.model] == []
    assert found["evicting"] > 20
    assert found["evicting_partly"] > 5
