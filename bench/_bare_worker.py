"""What a bare transfer and a bare apply take inside a vLLM worker, to compare a publication with.

Owns: `BareExtension`, Muster's worker extension with two more verbs. `bench_receive` starts a plain
gloo broadcast into memory of its own, in a thread, while the engine does what it does (the
`receive` of bench/publication.py, in the engine's process). `bench_apply` puts those tensors in
place by vLLM's own way of loading again, layer by layer, and says how long it took. Does not cover:
digests, versions, pauses: that is what makes it bare.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import torch

from bench._bare_transfer import receive_bare
from muster.transfer import group as transport
from muster.transfer import manifest as weights
from services.inference.adapters.vllm_receiver import MusterWorkerExtension


class BareExtension(MusterWorkerExtension):
    """See the module."""

    model_runner: Any
    _bare: torch.Tensor | None = None  # kept: memory that was never written to is slow

    def bench_receive(self, manifest: str, spec: str) -> None:
        """Both as msgspec JSON. Returns at once."""
        size = weights.layout(msgspec.json.decode(manifest, type=weights.Manifest).tensors)[1]
        if self._bare is None:
            self._bare = torch.zeros(size, dtype=torch.uint8)
        source = msgspec.json.decode(spec, type=transport.GroupSpec)
        threading.Thread(target=receive_bare, args=(source, self._bare), daemon=True).start()

    def bench_apply(self, manifest: str) -> float:
        """Seconds to put what was received in place; the engine must be idle."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        assert self._bare is not None, "nothing was received"
        tensors = weights.unpack(self._bare, msgspec.json.decode(manifest, type=weights.Manifest))
        runner = self.model_runner
        began = time.monotonic()
        with set_current_vllm_config(runner.vllm_config), torch.no_grad():
            initialize_layerwise_reload(runner.model)
            runner.model.load_weights(list(tensors.items()))
            finalize_layerwise_reload(runner.model, runner.vllm_config.model_config)
        return time.monotonic() - began
