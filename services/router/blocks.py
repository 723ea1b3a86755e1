"""Names of the whole blocks of a context: a chain of hashes, each over all tokens up to its end.

Owns: `BlockChain`. Promise: pure and stable between processes and runs; equal contexts have equal
names and others do not (64-bit BLAKE2b, its top bit dropped: names are non-negative and signed
64-bit); growing costs one hash per new block. Does not cover: which blocks a cache has (prefix.py).
"""

from __future__ import annotations

from hashlib import blake2b

from services.router.context import Context


class BlockChain:
    """The chain of one growing context."""

    def __init__(self, block_tokens: int):
        self._block = block_tokens
        self.name, self.tokens = 0, 0  # of the newest whole block; tokens up to its end

    def begin(self, name: int, blocks: int) -> None:
        """Be as after so many blocks, the last of them of that name."""
        self.name, self.tokens = name, blocks * self._block

    def extend(self, context: Context, end: int) -> list[int]:
        """Names of the whole blocks of the first `end` tokens that are new since the last call.

        `context` extends what was given before.
        """
        found: list[int] = []
        while self.tokens + self._block <= end:
            ids = context.block(self.tokens, self.tokens + self._block)
            digest = blake2b(self.name.to_bytes(8, "little") + ids, digest_size=8)
            self.name = int.from_bytes(digest.digest(), "little") >> 1
            self.tokens += self._block
            found.append(self.name)
        return found
