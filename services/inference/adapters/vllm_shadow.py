"""A second set of weights, processed for the engine's kernels beside the set that is serving.

Owns: `Shadow`. On a CPU vLLM packs weights for its kernels and throws the originals away, so new
weights must be packed anew: about half a second for a small model, more than everything else of an
update. A shadow does that work before the engine stops, on a tree of shallow copies of the model's
modules with fresh parameters, through the model's own `load_weights` and the layers' own
processing; putting it in place is then an exchange of references.
Promise: until swap_in the live model is not touched; a parameter that no tensor reached is an
error. Does not cover: GPUs (graphs pin addresses: layerwise reload copies in place there).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from services.inference.adapters import vllm_head

_TREES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Shadow:
    """New weights for `model`, ready to be put in place once."""

    def __init__(self, model: Any, tensors: dict[str, torch.Tensor]):
        self._pairs: list[tuple[Any, Any]] = []
        self._fresh: dict[int, Any] = {}
        self._tree = self._copy(model, {})
        with torch.no_grad():
            self._load(tensors)
            for _, twin in self._pairs:
                method = getattr(twin, "quant_method", None)
                if isinstance(method, QuantizeMethodBase):
                    _process(method, twin)
                vllm_head.follow(twin)

    def _copy(self, live: Any, seen: dict[int, Any]) -> Any:
        """A shallow copy of a module and all below it; shared modules stay shared."""
        if id(live) in seen:
            return seen[id(live)]
        twin = copy.copy(live)
        seen[id(live)] = twin
        for name in _TREES:
            twin.__dict__[name] = copy.copy(live.__dict__[name])
        # As it was before processing: that is what the model's loaders expect.
        recorded, _ = get_layerwise_info(live).restore_metadata
        for name, current in live._parameters.items():
            if current is not None:
                template = recorded.get(name, current)
                twin._parameters[name] = self._parameter(current, template, live)
        self._pairs.append((live, twin))
        for name, child in live._modules.items():
            if child is not None:
                twin._modules[name] = self._copy(child, seen)
        return twin

    def _parameter(self, current: Any, template: Any, layer: Any) -> Any:
        """Fresh memory in the shape of `template`; one for all holders of a tied parameter."""
        if id(current) not in self._fresh:
            # The recorded loaders had their layer taken out; they read only its settings.
            fresh = restore_layer_refs(materialize_meta_tensor(template), layer)
            _unwrap(fresh)
            self._fresh[id(current)] = fresh
        return self._fresh[id(current)]

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        loaded = self._tree.load_weights(iter(tensors.items()))
        unreached = {name for name, _ in self._tree.named_parameters()} - set(loaded or ())
        if unreached:
            raise RuntimeError(f"no tensor of the update reached {min(unreached)!r}")

    def swap_in(self) -> None:
        """Put the new weights in place. References only: microseconds per layer."""
        for live, twin in self._pairs:
            for name, fresh in twin._parameters.items():
                if fresh is not None:
                    live._parameters[name].data = fresh.data
            for name, value in twin.__dict__.items():
                if name not in _TREES and live.__dict__.get(name) is not value:
                    live.__dict__[name] = value


def _unwrap(parameter: Any) -> None:
    """Give it its own loader. Loading a live model again leaves the recorded one wrapped in a
    loader that hands tensors to the live layer, or drops them when that is complete."""
    loader: Any = getattr(parameter, "weight_loader", None)
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
        parameter.weight_loader = loader


def _process(method: Any, twin: Any) -> None:
    """As after loading, whatever was processed before.

    A layer of experts whose kernel exists is taken for one whose memory the kernel holds, and vLLM
    leaves out what the kernel does with fresh weights; on a CPU that packs them.
    """
    kernel = getattr(method, "moe_kernel", None)
    method.process_weights_after_loading(twin)
    if kernel is not None:
        kernel.fused_experts.process_weights_after_loading(twin)
