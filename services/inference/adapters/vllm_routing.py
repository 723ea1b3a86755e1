"""Which experts the tokens of each step went to, in a CPU engine.

Owns: `StepRouting`. vLLM has the parts (hooks on the routers, a store by the hashes of KV blocks,
so that tokens found in the prefix cache keep the routing they were computed with), and puts them
together in its model runner for GPUs only; this puts them together around the runner for CPUs.
Promise: row i of what a request gets is of the token at its position; memory is bounded by the KV
cache's size. Does not cover: what is asked for (vllm.py), how it is sent (server.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector


class StepRouting:
    """Of one worker. A step is begun before its forward pass and ended after its sampling."""

    def __init__(self, vllm_config: Any, runner: Any, kv_cache_config: Any):
        self._runner = runner
        self._connector = AuxOutputWorkerConnector(
            vllm_config=vllm_config, model=runner.get_model(), kv_cache_config=kv_cache_config
        )

    def begin(self, scheduled: Any) -> None:
        """scheduled: what the scheduler chose for this step."""
        self._connector.begin_step(scheduled.aux_output_connector_metadata)

    def end(self) -> dict[str, AuxRequestOutput] | None:
        """Rows by request, of the batch that was just computed."""
        batch, runner = self._runner.input_batch, self._runner
        count = batch.num_reqs
        pending = self._connector.prepare_output(
            SimpleNamespace(
                req_ids=batch.req_ids[:count],
                query_start_loc_np=runner.query_start_loc.np[: count + 1].copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
            )
        )
        if pending is None:
            return None
        # A prompt that is prefilled in pieces samples nothing before its last.
        sampled = np.where(runner.discard_request_mask.np[:count], 0, 1)
        pending.enqueue_cpu_copy(sampled, np.zeros(count, dtype=np.int32))
        rows: dict[str, AuxRequestOutput] = pending.process_output()
        return rows

    def close(self) -> None:
        self._connector.close()
