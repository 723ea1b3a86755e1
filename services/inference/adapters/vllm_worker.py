"""vLLM's CPU worker, which also tells what was left to choose from and which experts were chosen.

Owns: `MusterCpuWorker`. vLLM returns both from its model runner for GPUs; the places for them in
the outputs of a step are there for every runner, so this fills them. Promise: what the engine
computes is not changed. Does not cover: taking them to their requests (vllm_scheduler.py).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from services.inference.adapters.vllm_head import use_float32_heads
from services.inference.adapters.vllm_masks import KeptTokens
from services.inference.adapters.vllm_setup import returns_experts


class MusterCpuWorker(CPUWorker):  # type: ignore[misc] # vLLM is untyped here
    """See the module."""

    _kept: KeptTokens | None = None
    _routing: Any = None

    def load_model(self, **options: Any) -> None:
        use_float32_heads()
        super().load_model(**options)
        self._kept = KeptTokens(self.model_runner.sampler)
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.running = self.model_runner.requests

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        if returns_experts(self.vllm_config):
            from services.inference.adapters.vllm_routing import StepRouting

            self._routing = StepRouting(self.vllm_config, self.model_runner, kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._routing is not None:
            self._routing.begin(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if not output.req_ids:
            return output  # one for all steps without any request
        if self._kept is not None:
            output.sampling_masks = self._kept.take()
        if self._routing is not None:
            output.aux_output_connector_output = self._routing.end()
        return output

    def shutdown(self) -> None:
        if self._routing is not None:
            self._routing.close()
        super().shutdown()
