"""The router of bench.collection_real: the shipped service, whose model follows a plan.

    COLLECTION_REAL_BOOK=FILE python -m bench._real_router --config FILE

A small model does not follow a plan of turns. So each request asks for exactly as many tokens as
planned, and what the router reads as the reply's text is the planned command or DONE. Promise: all
else is the shipped code: contexts are the sampled tokens and what boxes print, records, credits,
holds, calls. Verifiers, and cold starts where the book has them, wait as planned before the real
call; the planned reward stands. Does not cover: the plans (_real_plan.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from bench._real_plan import Book, reply
from muster.types import EpisodeKey, FinishReason, VerdictStatus, job_and_index
from services.router import events as e
from services.router.adapters import calls
from services.router.adapters.replicas import ReplicaCalls
from services.router.carriers import Message
from services.router.conversation import ChatCodec
from sim.rollout.workload import Plan

BOOK = "COLLECTION_REAL_BOOK"


class Unending:
    """A codec whose replies end only where the tokens asked for end."""

    stop_ids: tuple[int, ...] = ()

    def __init__(self, codec: ChatCodec):
        self._codec = codec

    def render(self, messages: tuple[Message, ...], *, generate: bool) -> str:
        return self._codec.render(messages, generate=generate)

    def encode(self, text: str, *, special: bool) -> list[int]:
        return self._codec.encode(text, special=special)

    def decode(self, ids: tuple[int, ...]) -> str:
        return self._codec.decode(ids)


class PlannedCalls(calls.Calls):
    """Calls whose replies and waits are those of a book."""

    def __init__(self, book: Book, codec: ChatCodec, *more: Any, **named: Any):
        super().__init__(codec, *more, **named)
        self._book = book
        self._plan = lru_cache(maxsize=4096)(book.planned().plan)
        self._starts = asyncio.Semaphore(book.regime.cold_at_once)
        self.replicas = ReplicaCalls(self._channels, Unending(codec))

    def plan(self, key: EpisodeKey) -> Plan:
        """Of this attempt."""
        _, index = job_and_index(key.group) or ("", 0)
        return self._plan(index, key.sibling, key.attempt)

    async def generate(self, command: e.Generate) -> e.RouterEvent:
        """See Calls; a plan that filled its context is over."""
        plan, number = self.plan(command.episode), command.turn
        if number >= len(plan.turns):
            return e.ContextFull(command.episode, number)
        told = await super().generate(
            replace(command, max_tokens=plan.turns[number].sampled_tokens)
        )
        if not isinstance(told, e.Generated):
            return told
        last = number + 1 == len(plan.turns)
        if last and plan.context_full and not plan.turns[number].observation_tokens:
            return e.ContextFull(command.episode, number)
        text = reply(plan, number, command.episode.id, self._book.words.around)
        return replace(told, text=text, finish=FinishReason.STOP)

    async def acquire(self, command: e.AcquireBox) -> e.RouterEvent:
        """See Calls."""
        if self._book.cold:
            async with self._starts:
                await asyncio.sleep(self.plan(command.episode).box_start_s)
        return await super().acquire(command)

    async def verify(self, command: e.Verify) -> e.RouterEvent:
        """See Calls."""
        plan, (start, _) = self.plan(command.episode), self._clocks.start()
        await asyncio.sleep(plan.verify_s)
        told = await super().verify(command)
        if not isinstance(told, e.VerdictGiven):
            return told
        given = {"status": VerdictStatus.REWARDED, "reward": plan.reward, "start_unix_s": start}
        return replace(told, **given)


def written(book: Book) -> bytes:
    """As this process reads it."""
    return msgspec.json.encode(book)


def main() -> int:
    from services.router.__main__ import main as shipped

    book = msgspec.json.decode(Path(os.environ[BOOK]).read_bytes(), type=Book)
    calls.Calls = partial(PlannedCalls, book)  # type: ignore[misc, assignment]
    return shipped()


if __name__ == "__main__":
    sys.exit(main())
