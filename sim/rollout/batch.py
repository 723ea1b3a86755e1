"""Arithmetic of a decoding batch: contexts that grow by a token a step, counted without a loop.

Owns: how many requests decode, the sum of their contexts and when they cross into a new block.
Promise: the same figures as counting request by request and step by step. Does not cover: time.
"""

from __future__ import annotations


class Batch:
    """Decoding requests after `step` whole steps. A context is what the next step works on: it ends
    with the token sampled last, whose KV that step computes."""

    __slots__ = ("_block", "_phases", "context", "paid", "size", "step")

    def __init__(self, block: int):
        self._block = block
        self._phases = [0] * block  # by context modulo block at step 0
        self.size = 0
        self.context = 0  # tokens, the sum over the batch
        self.step = 0
        self.paid = 0  # the newest step that has its blocks

    def join(self, context: int) -> int:
        """One more, from the next step on; returns its origin: context = origin + step."""
        origin = context - self.step
        self._phases[origin % self._block] += 1
        self.size += 1
        self.context += context
        return origin

    def leave(self, origin: int) -> int:
        """One less; returns its context."""
        context = origin + self.step
        self._phases[origin % self._block] -= 1
        self.size -= 1
        self.context -= context
        return context

    def advance(self, steps: int) -> int:
        """After so many more steps; returns the blocks that they took and that were not paid."""
        self.step += steps
        self.context += self.size * steps
        unpaid = self.step - self.paid
        if unpaid <= 0:
            return 0
        blocks = self.crossings(self.paid, unpaid)
        self.paid = self.step
        return blocks

    def crossings(self, after: int, steps: int) -> int:
        """Blocks that the batch needs anew in the `steps` steps after step `after`.

        Step s works on context origin + s - 1 and needs a block when that is 1 modulo block.
        """
        block, phases = self._block, self._phases
        rounds, rest = divmod(steps, block)
        found = rounds * self.size
        if rest:
            high = (1 - after) % block  # phase that crosses in the first of them
            low = high - rest + 1
            if low >= 0:
                found += sum(phases[low : high + 1])
            else:
                found += sum(phases[: high + 1]) + sum(phases[low:])
        return found

    def steps_within(self, blocks: int, most: int) -> int:
        """How many of the next `most` steps need at most so many unpaid blocks in all."""
        after, paid = self.step, max(self.paid - self.step, 0)
        if most <= paid + blocks // max(self.size, 1) * self._block:
            return most
        low, high = paid, most  # low fits; find the last that does
        while low < high:
            middle = (low + high + 1) // 2
            if self.crossings(after + paid, middle - paid) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low
