"""Loading a live model again, in the memory that it has: vLLM's layerwise reload, made whole.

Owns: `Reload`, the three steps of it, and for which models it will do. Promise: every parameter is
reached or it fails; what is packed from a weight that two modules share is packed anew for both;
until `begin` the model is not touched, and between `begin` and the end of `finish` it is no model.
Does not cover: packing beside the model that serves (vllm_shadow.py), receiving (vllm_receiver.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from services.inference.adapters import vllm_head

_PACKED = "cpu_linear"
"""Attribute of a layer on a CPU: the product with its packed weights."""


def possible(model: Any) -> bool:
    """False for a model that vLLM does not load again as it did at first: a layer of experts whose
    kernel exists is taken for one whose memory the kernel holds, and is not packed on a CPU."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return not any(getattr(method, "moe_kernel", None) is not None for method in methods)


class Reload:
    """One of them. `under_way`: the model is half loaded, and no other can be begun."""

    def __init__(self, model: Any, model_config: Any):
        self._model, self._config = model, model_config
        self.under_way = False
        self._names: set[str] = set()
        self._sharing: list[Any] = []

    def begin(self) -> None:
        """The model's layers are taken apart."""
        self._names = {name for name, _ in self._model.named_parameters()}
        # Only a CPU packs them; what a GPU's layers do with their weights need not bear it twice.
        self._sharing = _sharing(self._model) if current_platform.is_cpu() else []
        self.under_way = True
        initialize_layerwise_reload(self._model)

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """All of them. RuntimeError when a parameter is left as it was."""
        loaded = self._model.load_weights(iter(tensors.items()))
        # On a GPU parameters have other names than what is loaded where kernels keep their own.
        unreached = self._names - set(loaded or ()) if current_platform.is_cpu() else ()
        if unreached:
            raise RuntimeError(f"no tensor of the update reached {min(unreached)!r}")

    def finish(self) -> None:
        """The model is whole again, its weights where they were."""
        # They got nothing themselves, so vLLM packs nothing for them: a tied head, most of all.
        left = [m for m in self._sharing if get_layerwise_info(m).load_numel <= 0]
        left = [m for m in left if get_layerwise_info(m).can_load()]
        finalize_layerwise_reload(self._model, self._config)
        with torch.no_grad():
            for module in left:
                if vllm_head.renew(module):
                    vars(module).pop(_PACKED, None)  # never asked for; if it is, it fails
                else:
                    module.quant_method.process_weights_after_loading(module)
            for module in self._model.modules():
                if module not in left:
                    vllm_head.renew(module)
        self.under_way = False


def _sharing(model: Any) -> list[Any]:
    """Modules that pack weights of which another module holds one, too."""
    held = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
        and any(held[id(p)] > 1 for p in module._parameters.values() if p is not None)
    ]
