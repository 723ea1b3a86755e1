"""New weights are processed as the first ones were, whatever a layer keeps from then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and torch warn at import


def experts() -> Any:
    """A model of one layer of experts, loaded and packed (here: its sign is turned)."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Packing:
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight.data = -layer.weight.data

    class Method(QuantizeMethodBase):  # type: ignore[misc] # vLLM is untyped here
        moe_kernel: Any = None

        def create_weights(self, *given: Any, **named: Any) -> None: ...

        def apply(self, *given: Any, **named: Any) -> Any: ...

        def process_weights_after_loading(self, layer: Any) -> None:
            """Packs the first weights only, as vLLM's does."""
            if self.moe_kernel is None:
                self.moe_kernel = SimpleNamespace(fused_experts=Packing())
                self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
            self.quant_method = Method()

        def load_weights(self, tensors: Any) -> set[str]:
            for _, tensor in tensors:
                self.weight.data.copy_(tensor)
            return {"weight"}

    model = Model()
    model.quant_method.process_weights_after_loading(model)
    return model


def test_weights_of_experts_are_packed_for_their_kernel_each_time() -> None:
    from services.inference.adapters.vllm_shadow import Shadow

    model = experts()
    assert model.weight.tolist() == [-1.0, -1.0]
    for value in (2.0, 3.0):
        shadow = Shadow(model, {"weight": torch.full((2,), value)})
        shadow.swap_in()
        assert model.weight.tolist() == [-value, -value]
