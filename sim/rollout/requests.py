"""A modelled engine's requests: what is told of a finished one, what is known of a live one, and
the line of those that wait.

Owns: the order of the line. Promise: the smaller priority goes first, as in vLLM, and equal ones in
order of arrival, also those that gave way. Does not cover: when they start (engine.py).
"""

from __future__ import annotations

from heapq import heappop, heappush

from muster.errors import InvalidInput
from muster.types import Value
from sim.rollout.chain import Chain
from sim.rollout.kv import Hold


class Done(Value, frozen=True):
    """A finished request, at second `at`. queue_s + prefill_s + decode_s is its whole time.

    cached_tokens: of the prompt, found at its first start. prefill_s: from its first start to its
    first token. recomputed_tokens: prefilled though some engine had computed them for this chain
    before (the rest of a block counts), also after having given way `preemptions` times.
    """

    id: str
    at: float
    cached_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    recomputed_tokens: int = 0
    preemptions: int = 0


class Request:
    """A live one. While it decodes, its context is `origin` + the batch's step."""

    __slots__ = (
        "cached",
        "chain",
        "first_at",
        "gone",
        "hold",
        "id",
        "made",
        "order",
        "origin",
        "preemptions",
        "prefilled",
        "quiet",
        "recomputed",
        "sampled",
        "started_at",
        "submitted_at",
        "todo",
        "tokens",
    )

    def __init__(self, name: str, chain: Chain, sampled: int, now: float, order: tuple[float, int]):
        self.id, self.chain, self.sampled, self.submitted_at = name, chain, sampled, now
        self.order = order
        self.tokens = chain.tokens  # to be in the KV before it samples on
        self.made = 0  # sampled so far, up to date while it does not decode
        self.cached = 0
        self.started_at = self.first_at = -1.0
        self.hold: Hold | None = None
        self.todo = self.prefilled = 0  # of this start's prefill, in tokens
        self.origin: int | None = None
        self.recomputed = self.preemptions = 0
        self.quiet = self.gone = False  # its end is not told; aborted

    def started(self, hold: Hold, now: float) -> int:
        """It holds its prompt's blocks; returns the tokens that it computes again."""
        self.hold = hold
        if self.started_at < 0:
            self.started_at, self.cached = now, hold.cached_tokens
        self.prefilled, self.todo = 0, self.tokens - hold.cached_tokens
        again = max(0, min(self.chain.computed, self.tokens) - hold.cached_tokens)
        self.recomputed += again
        return again

    def progress(self, tokens: int) -> None:
        """So much more is prefilled."""
        self.prefilled += tokens
        self.todo -= tokens

    def done(self, now: float) -> Done:
        """What is told of it."""
        return Done(
            self.id,
            now,
            self.cached,
            self.started_at - self.submitted_at,
            self.first_at - self.started_at,
            now - self.first_at,
            self.recomputed,
            self.preemptions,
        )


def check(chain: Chain, sampled: int, kv_tokens: int) -> None:
    """InvalidInput for a request that asks for nothing or that never fits."""
    if sampled < 1 or chain.tokens < 1:
        raise InvalidInput(
            "nothing to do", field="sampled", value=sampled, way_out="at least one token each"
        )
    if chain.tokens + sampled > kv_tokens:
        raise InvalidInput(
            "the context cannot fit this engine's KV",
            field="tokens",
            value=chain.tokens + sampled,
            way_out=f"end it before {kv_tokens} tokens",
        )


class Line:
    """Those that wait, by order."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Request]] = []

    @property
    def head(self) -> Request | None:
        """Who starts next; never one that is gone."""
        return self._heap[0][1] if self._heap else None

    def join(self, request: Request) -> None:
        """To its place."""
        heappush(self._heap, (request.order, request))

    def pop(self) -> None:
        """The head starts."""
        heappop(self._heap)
        self.tidy()

    def tidy(self) -> None:
        """Forget those at the head that are gone."""
        while self._heap and self._heap[0][1].gone:
            heappop(self._heap)
