"""How vLLM is set up: the environment its processes read, and the arguments of the engine.

Does not cover: running it (vllm.py).
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from muster.fingerprint import ServingFingerprint
from services.inference.adapters.vllm_plugin import BACKEND
from services.inference.config import InferenceConfig

_ADAPTERS = "services.inference.adapters"
_EXTENSION = f"{_ADAPTERS}.vllm_receiver.MusterWorkerExtension"
_CPU_WORKER = f"{_ADAPTERS}.vllm_worker.MusterCpuWorker"
_CPU_SCHEDULER = f"{_ADAPTERS}.vllm_scheduler.MusterScheduler"
EXPERTS = "muster_experts"
"""Name of the setting in vLLM's additional_config (vllm_scheduler.py)."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
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
        settings["worker_cls"] = _CPU_WORKER
        settings["scheduler_cls"] = _CPU_SCHEDULER
        settings["additional_config"] = {EXPERTS: config.return_experts}
    elif config.return_experts and _is_moe(path):
        settings["enable_return_routed_experts"] = True
    if config.head_dtype != "model":
        settings["hf_overrides"] = {"head_dtype": config.head_dtype}
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


def tells_masks() -> bool:
    """What was left to choose from: told on a CPU only (vllm_worker.py). On a GPU vLLM tells it
    where every request has a top_k, which most of ours have not."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def returns_experts(vllm_config: Any) -> bool:
    """True when routing is asked for and the model has any."""
    asked = vllm_config.aux_output_config.enabled or vllm_config.additional_config.get(EXPERTS)
    return bool(asked and vllm_config.model_config.is_moe)


def serving(vllm_config: Any, attention_backend: str) -> ServingFingerprint:
    """What the figures of an engine depend on; attention_backend: as its worker tells it."""
    import torch
    import vllm

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    flags = {
        "block_size": vllm_config.cache_config.block_size,
        "chunked_prefill": vllm_config.scheduler_config.enable_chunked_prefill,
        "enforce_eager": model.enforce_eager,
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "logprobs_mode": model.logprobs_mode,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "prefix_caching": vllm_config.cache_config.enable_prefix_caching,
        "tensor_parallel": parallel.tensor_parallel_size,
        "torch": torch.__version__,
    }
    return ServingFingerprint(
        engine="vllm",
        engine_version=vllm.__version__,
        dtype=_dtype(model.dtype),
        quantization=model.quantization or "",
        attention_backend=attention_backend,
        device=vllm_config.device_config.device_type,
        head_dtype=_dtype(model.head_dtype),
        flags=tuple(sorted(f"{name}={value}" for name, value in flags.items())),
    )


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _is_moe(path: str) -> bool:
    """vLLM refuses to return the routing of a model without any."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(path).get_text_config()
    return any(getattr(found, name, 0) for name in _EXPERT_COUNTS)
