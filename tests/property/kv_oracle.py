"""vLLM V1's block pool, block by block and slowly: what sim/rollout/kv.py must equal.

Owns: nothing but the rules, in the order in which vLLM's own code has them (block_pool.py:
get_new_blocks, touch, free_blocks, cache_full_blocks). Does not cover: speed.
"""

from __future__ import annotations

from collections.abc import Hashable

from sim.rollout.chain import Chain

Identity = tuple[Hashable, int]


def identities(chain: Chain, tokens: int, block: int) -> list[Identity]:
    """Of each whole block: its last token, which no other prefix has."""
    found: list[Identity] = []
    for end in range(block, tokens + 1, block):
        inside = [run for run in chain.runs[:-1] if run.start < end <= run.end]
        found.append(((inside or chain.runs[-1:])[0].key, end))
    return found


class DumbHold:
    def __init__(self, chain: Chain):
        self.chain = chain
        self.blocks: list[int] = []
        self.full = 0
        self.cached_tokens = 0


class DumbCache:
    """The interface of PrefixCache."""

    def __init__(self, tokens: int, block: int):
        self.block = block
        self.queue = list(range(tokens // block))  # free blocks, the next to go first
        self.refs = [0] * (tokens // block)
        self.content: dict[int, Identity] = {}
        self.found: dict[Identity, list[int]] = {}  # in the order in which they were cached

    @property
    def free(self) -> int:
        return len(self.queue)

    def match(self, chain: Chain, tokens: int | None = None) -> int:
        return len(self._hit(chain, chain.tokens if tokens is None else tokens)) * self.block

    def _hit(self, chain: Chain, tokens: int) -> list[int]:
        hit = []
        for identity in identities(chain, tokens - 1, self.block):
            if identity not in self.found:
                break
            hit.append(self.found[identity][0])
        return hit

    def admit(self, chain: Chain, tokens: int | None = None) -> DumbHold | None:
        length = chain.tokens if tokens is None else tokens
        hit = self._hit(chain, length)
        new = -(-length // self.block) - len(hit)
        if new + sum(self.refs[number] == 0 for number in hit) > self.free:
            return None
        hold = DumbHold(chain)
        for number in hit:
            if self.refs[number] == 0:
                self.queue.remove(number)
            self.refs[number] += 1
        hold.blocks = hit + self._new(new)
        hold.full = len(hit)
        hold.cached_tokens = len(hit) * self.block
        return hold

    def _new(self, count: int) -> list[int]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for number in taken:
            identity = self.content.pop(number, None)
            if identity is not None:
                self.found[identity].remove(number)
                if not self.found[identity]:
                    del self.found[identity]
            self.refs[number] = 1
        return taken

    def grow(self, hold: DumbHold, tokens: int) -> bool:
        new = -(-tokens // self.block) - len(hold.blocks)
        if new > self.free:
            return False
        if new > 0:
            hold.blocks += self._new(new)
        return True

    def fill(self, hold: DumbHold, tokens: int) -> None:
        every = identities(hold.chain, tokens, self.block)
        for at in range(hold.full, len(every)):
            self.content[hold.blocks[at]] = every[at]
            self.found.setdefault(every[at], []).append(hold.blocks[at])
            hold.full = at + 1

    def release(self, hold: DumbHold) -> None:
        first, last = [], []
        for number in reversed(hold.blocks):
            self.refs[number] -= 1
            if self.refs[number] == 0:
                (last if number in self.content else first).append(number)
        self.queue = first + self.queue + last
        hold.blocks, hold.full = [], 0

    def clear(self) -> None:
        assert not any(self.refs)
        self.content.clear()
        self.found.clear()
