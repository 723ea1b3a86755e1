"""Random workloads on the cache kept as runs and on the one kept block by block: never a
difference."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.rollout.chain import Chain
from sim.rollout.kv import Hold, PrefixCache
from tests.property.kv_oracle import DumbCache, DumbHold

CHAINS = 5
OPERATIONS = (
    ["open"]
    + 6 * ["admit"]
    + 3 * ["grow"]
    + 4 * ["fill"]
    + 5 * ["release"]
    + ["extend", "fork", "clear", "turn", "turn"]
)


class Pair:
    """Both caches, driven alike."""

    def __init__(self, blocks: int, block: int, named: tuple[int, int, int]):
        self.fast, self.dumb = PrefixCache(blocks * block, block), DumbCache(blocks * block, block)
        self.named, self.block = named, block
        self.chains: list[Chain] = []
        self.holds: list[tuple[Hold, DumbHold, list[int]]] = []

    def do(self, name: str, which: int, size: int) -> None:
        if name == "open" and len(self.chains) < CHAINS:
            system, group, other = self.named
            names = (("s", system), ("g", group) if which % 2 else ("h", other))
            self.chains.append(Chain.shared(*names[: which % 3]))
            self.chains[-1].extend(size)
        elif name in ("admit", "extend", "fork", "turn"):
            getattr(self, name)(self.chains[which % len(self.chains)], size)
        elif self.holds and name in ("grow", "fill", "release"):
            getattr(self, name)(which % len(self.holds), size)
        elif name == "clear" and not self.holds:
            self.fast.clear()
            self.dumb.clear()

    def admit(self, chain: Chain, size: int) -> None:
        tokens = chain.tokens if size % 3 else max(1, chain.tokens - size)
        if tokens < 1:
            return
        mine, other = self.fast.admit(chain, tokens), self.dumb.admit(chain, tokens)
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert mine.cached_tokens == other.cached_tokens
            self.holds.append((mine, other, [tokens]))

    def extend(self, chain: Chain, size: int) -> None:
        chain.extend(size)

    def fork(self, chain: Chain, size: int) -> None:
        if all(mine.chain is not chain for mine, _, _ in self.holds):
            self.chains.append(chain.fork())

    def turn(self, chain: Chain, size: int) -> None:
        """A whole request, with nobody in between, whose chain goes on."""
        self.admit(chain, 1)
        if self.holds and self.holds[-1][0].chain is chain:
            self.grow(len(self.holds) - 1, size)
            tokens = self.holds[-1][2][0]
            self.release(len(self.holds) - 1, 1)
            chain.extend(max(0, tokens - chain.tokens))

    def grow(self, at: int, size: int) -> None:
        mine, other, tokens = self.holds[at]
        grown = self.fast.grow(mine, tokens[0] + size)
        assert grown == self.dumb.grow(other, tokens[0] + size)
        if grown:
            tokens[0] += size

    def fill(self, at: int, size: int) -> None:
        mine, other, tokens = self.holds[at]
        self.fast.fill(mine, max(0, tokens[0] - size))
        self.dumb.fill(other, max(0, tokens[0] - size))

    def release(self, at: int, size: int) -> None:
        if size % 4:
            self.fill(at, 0)
        mine, other, _ = self.holds.pop(at)
        self.fast.release(mine)
        self.dumb.release(other)

    def check(self) -> None:
        assert self.fast.free == self.dumb.free
        for chain in self.chains:
            longer = chain.tokens + 2 * self.block + 1
            assert self.fast.match(chain, longer) == self.dumb.match(chain, longer)


@settings(max_examples=60)
@given(
    blocks=st.integers(3, 40),
    block=st.integers(1, 5),
    named=st.tuples(st.integers(0, 17), st.integers(0, 17), st.integers(0, 17)),
    longest=st.integers(2, 25),
    seed=st.integers(0, 2**32),
)
def test_runs_and_single_blocks_never_differ(
    blocks: int, block: int, named: tuple[int, int, int], longest: int, seed: int
) -> None:
    pair, draw = Pair(blocks, block, named), Random(seed)
    pair.do("open", 2, longest)
    for _ in range(150):
        pair.do(draw.choice(OPERATIONS), draw.randrange(60), draw.randrange(longest))
        pair.check()
    for hold, dumb, _ in reversed(pair.holds):
        pair.fast.release(hold)
        pair.dumb.release(dumb)
    pair.check()
    assert pair.fast.used == 0
