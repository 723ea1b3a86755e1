"""vLLM's scheduler, which takes sampling masks and routed experts of a step to their requests.

Owns: `MusterScheduler`. vLLM does it where the configuration asks for it, and that it refuses for a
CPU engine; masks it would then demand of every request. Promise: nothing about the order of
requests is changed. Does not cover: where the figures come from (vllm_worker.py).
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.sched.scheduler import Scheduler

from services.inference.adapters.vllm_setup import returns_experts


class MusterScheduler(Scheduler):  # type: ignore[misc] # vLLM is untyped here
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.return_sampling_mask = True
        if returns_experts(self.vllm_config):
            self.aux_output_connector = AuxOutputSchedulerConnector()
