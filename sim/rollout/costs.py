"""What the modelled engine's work costs in engine time.

Owns: the constants of the simulated workload (measured on one engine of the studies behind
docs/results/collection.md) and the two formulas. Promise: prefill of one request costs the same in
one piece as in many. Does not cover: who shares a step (engine.py). The prefill formula leaves out
attention to cached tokens, so a policy must not be credited for slicing a re-prefill.
"""

from __future__ import annotations

from muster.types import Value


class EngineCosts(Value, frozen=True):
    """Seconds of engine time; x = 1,000 tokens."""

    prefill_base_s: float = 0.066
    prefill_linear_s: float = 0.0570  # per 1,000 uncached tokens of the request
    prefill_square_s: float = 0.0044  # per square of 1,000 uncached tokens
    decode_base_s: float = 0.0106  # per step
    decode_request_s: float = 0.00042  # per sampling request and step
    decode_context_s: float = 1.42e-7  # per token of context of the sampling requests and step

    def prefill_s(self, uncached_tokens: float) -> float:
        """Prefill of one request, seconds; the base even for none (the last is recomputed)."""
        x = uncached_tokens / 1000
        return self.prefill_base_s + (self.prefill_linear_s + self.prefill_square_s * x) * x

    def step_s(self, running: int, context_tokens: float) -> float:
        """One decode step of `running` requests with that many tokens of context in all."""
        return (
            self.decode_base_s
            + self.decode_request_s * running
            + self.decode_context_s * context_tokens
        )

    def growth_s(self, before: int, more: int) -> float:
        """How much one prefill's cost grows with `more` tokens after `before`, without the base."""
        x, y = before / 1000, more / 1000
        return (self.prefill_linear_s + self.prefill_square_s * (2 * x + y)) * y

    def steps_s(
        self, running: int, context_tokens: int, share: int, prefilled: int
    ) -> tuple[float, float]:
        """(a, b): n equal steps last (a + b n) n seconds.

        The k-th decodes context_tokens + running (k - 1) tokens of context and moves a prefill from
        prefilled + share (k - 1) tokens on by `share`; both sums over n are quadratic in n.
        """
        linear = square = 0.0
        if running:
            square = self.decode_context_s * running / 2
            linear = self.step_s(running, context_tokens) - square
        if share:
            x, y = prefilled / 1000, share / 1000
            linear += (self.prefill_linear_s + 2 * self.prefill_square_s * x) * y
            square += self.prefill_square_s * y * y
        return linear, square

    def peak_rate(self, kv_tokens: int, context_tokens: float) -> float:
        """Sampled tokens per second when the KV is full of contexts of that mean, no prefill."""
        running = max(1.0, kv_tokens / context_tokens)
        step = self.decode_base_s + self.decode_request_s * running
        return running / (step + self.decode_context_s * running * context_tokens)
