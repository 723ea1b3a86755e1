"""Which prefixes lie in which replica's KV cache, as far as the router can tell.

Owns: an index of (replica, salt, chain hash), written when a request is sent and when its reply
came, corrected by the cached tokens that engines report. The salt is the policy version: what one
version computed is never taken for another's. Promise: pure; at most `entries_max` entries per
replica, whatever happens: the least recently used goes first, of one chain its end first, as in
the engine. Does not cover: hashing (the shell, conversation.py), the choice (placements.py).

Why not the engines' own events: an engine that is cleared while idle publishes nothing until its
next step, so an index fed by events sends requests to caches that are gone exactly when all are
cold. Here a pushed version clears the index at once. Entries of a dead conversation age out; a
replica that left is forgotten whole (an index that kept removed blocks grew by 1 GB an hour:
ai-dynamo/dynamo issue 11678).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

Mark: TypeAlias = tuple[int, int]
"""(chain hash of the context up to here, tokens up to here); a request's marks ascend."""

_Key: TypeAlias = tuple[int, int]  # salt, chain hash
_Uses: TypeAlias = list[int]  # number of its newest use, and of the one before


class PrefixIndex:
    """What each replica is thought to have cached.

    Marks of one request: those of the prompt's blocks, then one per turn boundary. Whoever leaves
    some out only makes the index see less.
    """

    def __init__(self, block_tokens: int, entries_max: int):
        self._block_tokens, self._entries_max = block_tokens, entries_max
        self._caches: dict[str, OrderedDict[_Key, _Uses]] = {}
        self._uses = 0

    def dispatched(self, replica: str, salt: int, marks: Sequence[Mark]) -> None:
        """A request with these marks was sent there, or its reply came: its cache has them now.

        After a reply the marks include the boundary behind it, and `corrected` comes first.
        """
        cache = self._caches.get(replica)
        if cache is None:
            cache = self._caches[replica] = OrderedDict()
        self._uses += 1
        now = self._uses
        for hash_, _ in reversed(marks):  # the end first: it is the first to go
            key = (salt, hash_)
            uses = cache.get(key)
            if uses is None:
                cache[key] = [now, 0]
            else:
                uses[1] = uses[0]
                uses[0] = now
                cache.move_to_end(key)
        while len(cache) > self._entries_max:
            cache.popitem(last=False)

    def cached(self, replica: str, salt: int, marks: Sequence[Mark]) -> int:
        """Tokens of the longest prefix that is thought to be there.

        The newest mark first, then by halves: of one chain, the index keeps the beginning longest.
        """
        cache = self._caches.get(replica)
        if not cache or not marks:
            return 0
        hash_, tokens = marks[-1]
        if (salt, hash_) in cache:
            return tokens
        low, high = 0, len(marks) - 1  # marks[:low] are there, marks[high:] are not
        while low < high:
            middle = (low + high) // 2
            if (salt, marks[middle][0]) in cache:
                low = middle + 1
            else:
                high = middle
        return marks[low - 1][1] if low else 0

    def corrected(self, replica: str, salt: int, marks: Sequence[Mark], cached_tokens: int) -> int:
        """Learn from what an engine found of a request; returns the tokens that it lacked.

        `marks`: those that the prediction rested on, up to the predicted tokens. Within a block
        the prediction held (0): the last token is always computed, and the engine's blocks may be
        coarser. Beyond, the cache had dropped what was last used when the newest of these marks
        was, so whatever was used no later is gone as well: it is dropped here. The request's own
        marks stay, for it has just computed them again.
        """
        if not marks:
            return 0
        hash_, tokens = marks[-1]
        shortfall = tokens - cached_tokens
        if shortfall <= self._block_tokens:
            return 0
        cache = self._caches.get(replica)
        uses = cache.get((salt, hash_)) if cache else None
        if cache and uses is not None:
            self._drop_until(cache, uses[1])
        return shortfall

    def clear(self, replica: str) -> None:
        """Its cache is empty: a pushed version, a new life, another block size."""
        cache = self._caches.get(replica)
        if cache is not None:
            cache.clear()

    def forget(self, replica: str) -> None:
        """It left."""
        self._caches.pop(replica, None)

    def entries(self, replica: str) -> int:
        """How many it holds for this replica; at most `entries_max`."""
        return len(self._caches.get(replica, ()))

    @staticmethod
    def _drop_until(cache: OrderedDict[_Key, _Uses], use: int) -> None:
        while cache:
            key = next(iter(cache))
            if cache[key][0] > use:
                return
            del cache[key]
