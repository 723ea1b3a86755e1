"""Settings of an inference replica."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from muster.config import Section


class InferenceConfig(Section):
    """One engine replica."""

    listen: str = "127.0.0.1:0"
    """Address to serve gRPC on; port 0 lets the system choose."""
    engine: Literal["vllm", "fake"] = "vllm"
    """vllm, or fake: replies made up from prompt and seed, without a model or torch, in the words
    of the model folder's tokenizer; for tests of the other services."""
    follow_versions: bool = False
    """For tests, with the fake engine: serve the versions that the run records as published, where
    the trainer sends none (trainer.transport = "none")."""
    max_model_len: int = Field(2048, ge=64)
    """Longest context, prompt and sampled tokens together."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """Memory for the KV cache, GiB; of the fake engine 65,536 tokens each."""
    max_requests: int = Field(32, ge=1, le=4096)
    """Requests admitted at once; more are refused, the router chooses another replica."""
    scores_max: int = Field(2, ge=1, le=64)
    """Score calls admitted at once."""
    threads: int = Field(0, ge=0)
    """CPU threads of the engine; 0 takes all cores."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights in the engine."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Type in which the output head's product and the softmax are computed; model: the type of the
    weights. As trainer.head_dtype, so that both sides do the same."""
    mask_ids_max: int = Field(1024, ge=0, le=65536)
    """Largest top_k of a request. What top-p and top-k left to choose from is returned with each
    token, for the trainer to choose from the same; top_k bounds it. 0: requests with either are
    refused."""
    return_experts: bool = True
    """Return the experts that a mixture-of-experts model sent each token to, for the trainer to
    send it there too. Other models have none."""
    experts_bytes_max: int = Field(16 << 20, ge=0, le=48 << 20)
    """Most that the routing of one reply may take, bytes; larger ones are left out and counted."""
    block_size: int = Field(32, ge=16)
    """KV block, tokens; shared prefixes are cached in whole blocks (multiple of 32 on CPU)."""
    credit_share: float = Field(1.0, gt=0, le=1)
    """Share of the KV cache that a router's conversations may fill; the rest is spare room for what
    they grow by between two of its looks."""
    credit_ttl_s: float = Field(10.0, ge=2, le=600)
    """How long a credit on the KV cache is good; a router asks about once a second."""
    canary_timeout_s: float = Field(60.0, gt=0)
    """Longest wait for the canary at start and after an apply."""
    finish_timeout_s: float = Field(60.0, gt=0, le=3600)
    """How long running requests may take to end where a publication lets them; those that are not
    over then are computed again under the new version."""
    stored_root: str = ""
    """Versions that the trainer stores are read below this folder; empty: none are."""
    apply_timeout_s: float = Field(120.0, gt=0)
    """Longest apply, from the pause until the canary has passed; then the replica is fenced."""
    receive_timeout_s: float = Field(600.0, gt=0)
    """Upper bound on the time limit that a trainer may set for one transfer."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Longest start of the engine, until its canary has passed."""
    stall_s: float = Field(120.0, gt=0)
    """Longest time without a token from any running request, updates apart, and without an answer
    to a verb of an update; then the replica serves nothing more and the service ends with an error,
    so that its supervisor starts it anew. Above the longest prefill."""
    isolate: bool = True
    """Own PID and mount namespaces (as root), so nothing outlives the service."""
