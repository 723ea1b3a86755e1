"""What a request is thought to cost an engine, in seconds.

Owns: the two formulas by which the router predicts. Promise: pure; monotone in every argument.
Does not cover: queues and caches (placements.py), what an engine really took (health.py compares).
Source of the form and of the default constants: `PrefillCostModel` and `DecodeThroughputModel` of
vllm-project/router (research on routers); `muster sim fit` measures those of a recorded run.
"""

from __future__ import annotations

from muster.types import Value
from services.router.rules import RouterRules


class Costs(Value, frozen=True):
    """Constants of one kind of engine; seconds, and seconds per unit."""

    prefill_base_s: float = 0.066
    prefill_linear_s: float = 0.0570  # per 1,000 uncached tokens
    prefill_square_s: float = 0.0044  # per square of 1,000 uncached tokens
    decode_base_s: float = 0.0106  # of one step
    decode_request_s: float = 0.00042  # … per request that runs
    decode_context_s: float = 1.42e-7  # … per token of their contexts

    @staticmethod
    def of(rules: RouterRules) -> Costs:
        """Those that the machine's rules name."""
        return Costs(
            prefill_base_s=rules.prefill_base_s,
            prefill_linear_s=rules.prefill_linear_s,
            prefill_square_s=rules.prefill_square_s,
            decode_base_s=rules.decode_base_s,
            decode_request_s=rules.decode_request_s,
            decode_context_s=rules.decode_context_s,
        )

    def prefill_s(self, uncached_tokens: int) -> float:
        """Seconds of a whole engine to prefill so many tokens.

        The base applies to any request: the last token of a prompt is always computed.
        """
        thousands = uncached_tokens / 1000
        linear = self.prefill_linear_s * thousands
        return self.prefill_base_s + linear + self.prefill_square_s * thousands * thousands

    def step_s(self, running: int, context_tokens: int) -> float:
        """Seconds of one decode step: `running` requests, `context_tokens` in all of them."""
        requests = self.decode_request_s * running
        return self.decode_base_s + requests + self.decode_context_s * context_tokens
