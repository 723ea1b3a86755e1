"""The prefix cache of the fake engine: which whole blocks of a context it has seen lately.

Owns: `PrefixCache`. Promise: deterministic, bounded; like the real one it caches whole blocks only
and never the whole of a prompt (its last token is computed anyway). Does not cover: memory that
running requests hold, when the cache is cleared (fake.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class PrefixCache:
    """Blocks by the hash of everything up to their end; the least recently used are dropped.

    Contexts with another salt share nothing.
    """

    def __init__(self, tokens: int, block: int):
        self._most, self._block = tokens // block, block
        self._blocks: dict[int, None] = {}  # oldest first

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()

    def cached(self, context: Sequence[int], salt: int = 0) -> int:
        """Tokens of the longest cached prefix, below the length of the context."""
        found = 0
        for end, name in self._chain(context, salt):
            if name not in self._blocks or end >= len(context):
                break
            found = end
        return found

    def take(self, context: Sequence[int], salt: int = 0) -> None:
        """Its whole blocks are cached now; the first blocks outlive the last ones."""
        for _, name in reversed(list(self._chain(context, salt))):
            self._blocks.pop(name, None)
            self._blocks[name] = None
        while len(self._blocks) > self._most:
            del self._blocks[next(iter(self._blocks))]

    def _chain(self, context: Sequence[int], salt: int) -> Iterator[tuple[int, int]]:
        name = salt
        for end in range(self._block, len(context) + 1, self._block):
            name = hash((name, tuple(context[end - self._block : end])))
            yield end, name
