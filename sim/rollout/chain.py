"""Token chains as runs: what a context consists of, without its tokens.

Owns: the identity of prefixes. Promise: two chains share exactly the tokens of their common runs;
`extend` is O(1). A run that is named is the same in every chain that begins with the same named
runs; a chain's own run is nobody else's, but for a fork, which shares what there was when it was
made. Does not cover: what of it is cached (kv.py). A turn that is sampled again in the same chain
counts as the same tokens, as it is with seeded sampling and equal weights.
"""

from __future__ import annotations

from collections.abc import Hashable


class Run:
    """Tokens [start, end) of a chain. The last run of a chain is open: its end moves."""

    __slots__ = ("end", "key", "start")

    def __init__(self, key: Hashable, start: int, end: int):
        self.key, self.start, self.end = key, start, end


class Chain:
    """An append-only sequence of tokens.

    `tokens` is its length; `computed` the most tokens of it that any engine ever had in its KV
    (engines raise it), so that a second prefill of the same tokens can be told from the first.
    """

    __slots__ = ("computed", "runs", "tokens")

    def __init__(self, runs: list[Run]):
        """Internal: `shared` and `fork` make chains."""
        start = runs[-1].end if runs else 0
        self.runs = [*runs, Run(object(), start, start)]
        self.tokens = start
        self.computed = 0

    @classmethod
    def shared(cls, *runs: tuple[str, int]) -> Chain:
        """A new chain that begins with named runs: ("system", 1800), ("group-7", 1200)."""
        made: list[Run] = []
        path, start = "", 0
        for name, tokens in runs:
            path = f"{path}/{name}:{tokens}"
            made.append(Run(path, start, start + tokens))
            start += tokens
        return cls(made)

    def extend(self, tokens: int) -> None:
        """Append tokens of its own."""
        self.tokens += tokens
        self.runs[-1].end = self.tokens

    def fork(self) -> Chain:
        """A chain that shares all of this one's tokens of now; both go on by themselves.

        Not while an engine samples for this chain: it would not know which of the two goes on.
        """
        made = Chain(self.runs)
        made.computed = self.computed
        self.runs = [*self.runs, Run(object(), self.tokens, self.tokens)]
        return made
