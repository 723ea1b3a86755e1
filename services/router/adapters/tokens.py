"""Tokens of long texts, made beside the event loop before they are needed.

Owns: openings that siblings share, observations whose turn comes next. Promise: only a store: what
is not here is encoded where it is needed, to the same ids; bounded by tokens (openings) and by
episodes (one observation each). Does not cover: the encoding (tokenizer.py), what enters a
conversation and when (calls.py).
"""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from services.router import events as e
from services.router.conversation import ChatCodec, Conversation, Opening, opening_of

_LONG = 1024  # characters, about 0.3 ms of encoding; a thread costs a third of that


class Tokens:
    """Of one router's conversations."""

    opening_tokens_max = 1 << 20  # of all openings that are kept; about 50 bytes each

    def __init__(self, codec: ChatCodec, block_tokens: int):
        self._codec, self._block_tokens = codec, block_tokens
        self._openings: dict[tuple[e.Message, ...], Opening] = {}
        self._kept = 0  # tokens of all of them
        self._making: WeakValueDictionary[tuple[e.Message, ...], asyncio.Lock]
        self._making = WeakValueDictionary()
        self._opening: dict[str, asyncio.Event] = {}  # episode id → its opening is under way
        self._seen: dict[str, tuple[str, list[int]]] = {}  # episode id → its next observation

    async def opening(self, messages: tuple[e.Message, ...]) -> Opening:
        """The tokens of an opening, made once for all that begin so."""
        making = self._making.setdefault(messages, asyncio.Lock())
        async with making:
            found = self._openings.get(messages)
            if found is None:
                found = await asyncio.to_thread(
                    opening_of, self._codec, messages, self._block_tokens
                )
                self._keep(messages, found)
            return found

    def opened(self, messages: tuple[e.Message, ...]) -> Opening | None:
        """The same when it was made before and is still kept."""
        return self._openings.get(messages)

    async def open(
        self, episode: str, messages: tuple[e.Message, ...], conversation: Conversation
    ) -> None:
        """Open an episode's conversation; a long opening is encoded beside the event loop.

        Without messages somebody did that before: waits until it is done.
        """
        if not messages:
            if episode in self._opening:
                await self._opening[episode].wait()
            return
        made = self.opened(messages)
        if made is None and sum(len(m.text) for m in messages) >= _LONG:
            self._opening[episode] = done = asyncio.Event()
            try:
                made = await self.opening(messages)
                conversation.open(messages, made)
            finally:
                del self._opening[episode]
                done.set()
            return
        conversation.open(messages, made)

    def _keep(self, messages: tuple[e.Message, ...], opening: Opening) -> None:
        """As long as there is room; the first that came goes first."""
        if messages in self._openings:
            return
        self._openings[messages] = opening
        self._kept += len(opening.ids)
        while self._kept > self.opening_tokens_max:
            gone = self._openings.pop(next(iter(self._openings)))
            self._kept -= len(gone.ids)

    async def encoded(self, text: str) -> list[int] | None:
        """Ids of a long text without markup; None for a short one."""
        if len(text) < _LONG:
            return None
        return await asyncio.to_thread(self._codec.encode, text, special=False)

    def expect(self, episode: str, text: str, ids: list[int] | None) -> None:
        """What that episode will probably observe next; `drop` it with the episode."""
        if ids is not None:
            self._seen[episode] = text, ids

    def expected(self, episode: str, text: str) -> list[int] | None:
        """The ids of exactly this text; None when another one, or none, was expected."""
        found = self._seen.pop(episode, None)
        return found[1] if found is not None and found[0] == text else None

    def drop(self, episode: str) -> None:
        self._seen.pop(episode, None)
