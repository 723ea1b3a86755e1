"""What the vLLM adapter counts: requests, KV, tokens, and the longest gap between tokens.

Promise: cheap, never blocks. Does not cover: timings of one request (vLLM reports those).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from muster.clock import monotonic
from services.inference.engine import Load


class LiveRequest:
    """A request in the engine; started once its first token left; aborted once that was asked."""

    def __init__(self) -> None:
        self.started = False
        self.aborted = False
        self.tokens = 0  # that left


class LoadMeter:
    """Requests in hand and KV in use."""

    def __init__(self) -> None:
        self.kv_tokens_total = 0
        self.steps = 0
        self._usage = 0.0
        self._live: dict[str, LiveRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def request(self, request_id: str) -> Iterator[LiveRequest]:
        """Counted while the block runs."""
        live = self._live[request_id] = LiveRequest()
        self._empty.clear()
        try:
            yield live
        finally:
            self.over(request_id)

    def over(self, request_id: str) -> None:
        """It has ended, whatever its caller still does with the end."""
        self._live.pop(request_id, None)
        if not self._live:
            self._empty.set()

    def abort_all(self) -> int:
        """All in hand are to end; the tokens that they have sampled so far."""
        for live in self._live.values():
            live.aborted = True
        return sum(live.tokens for live in self._live.values())

    async def emptied(self, wait_s: float) -> bool:
        """Waits until none is in hand, at most so many seconds; whether that came true."""
        try:
            async with asyncio.timeout(wait_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def find(self, request_id: str) -> LiveRequest | None:
        """That request, if it is in hand."""
        return self._live.get(request_id)

    def names(self) -> list[str]:
        """All requests in hand."""
        return list(self._live)

    def started(self) -> int:
        """Requests that have KV to lose."""
        return sum(live.started for live in self._live.values())

    def now(self, tokens_generated: int) -> Load:
        """All figures."""
        running = self.started()
        used = round(self._usage * self.kv_tokens_total) if self._live else 0
        waiting = len(self._live) - running
        return Load(running, waiting, self.kv_tokens_total, used, tokens_generated, self.steps)

    def factory(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """A vLLM stat logger that feeds this meter."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        meter = self

        class Logger(StatLoggerBase):  # type: ignore[misc] # vLLM is untyped here
            def __init__(self, vllm_config: Any, engine_index: int = 0):
                del vllm_config, engine_index

            def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
                meter.steps += 1  # called once for what each step of the engine gave
                if scheduler_stats is not None:
                    meter._usage = scheduler_stats.kv_cache_usage

            def log_engine_initialized(self) -> None:
                pass

        return Logger(vllm_config, engine_index)


class TokenMeter:
    """Sampled tokens since start, and the longest time in which none left while some were due."""

    def __init__(self) -> None:
        self.total = 0
        self._sampling: set[str] = set()
        self._last = 0.0
        self._longest = 0.0
        self._resumed = asyncio.Event()

    def tokens(self, request_id: str, at: float, count: int) -> None:
        """`count` tokens of a request left the engine at `at` (monotonic seconds)."""
        if self._sampling:
            self._longest = max(self._longest, at - self._last)
        self.total += count
        self._last = at
        self._sampling.add(request_id)
        self._resumed.set()

    def ended(self, request_id: str) -> None:
        """A request is over, however it ended."""
        self._sampling.discard(request_id)
        if not self._sampling:
            self._resumed.set()  # nobody is left to wait for

    def open_window(self) -> None:
        """Start looking for the longest gap."""
        self._longest = 0.0
        self._resumed.clear()

    def apply_done(self) -> None:
        """Tokens that leave from here on end the gap."""
        self._resumed.clear()

    async def close_window(self, *, wait_s: float) -> float:
        """Seconds; waits at most `wait_s` for the first token after the apply.

        If none has left by then (long contexts are being recomputed) it is the gap so far: the true
        one is longer.
        """
        if not self._sampling:
            return self._longest
        try:
            async with asyncio.timeout(wait_s):
                await self._resumed.wait()
        except TimeoutError:
            return max(self._longest, monotonic() - self._last)
        return self._longest
