"""The float32 head of a CPU engine: of the weights served, whichever they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and torch warn at import


def head_of(scale: float) -> torch.nn.Module:
    head = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    torch.nn.init.normal_(head.weight, std=scale)
    return head


def layer(dtype: Any = torch.float32) -> Any:
    """vLLM's layer, without an engine around it."""
    from services.inference.adapters.vllm_head import Float32Head

    made = object.__new__(Float32Head)
    torch.nn.Module.__init__(made)
    made.head_dtype = dtype
    return made


def exact(hidden: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
    return (hidden.double() @ head.weight.double().T).float()  # type: ignore[operator]


def test_logits_are_those_of_a_float32_product() -> None:
    torch.manual_seed(1)
    head, hidden = head_of(1.0), torch.randn(5, 64, dtype=torch.bfloat16)
    logits = layer()._apply_head(head, hidden, None)

    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, exact(hidden, head))
    assert (head(hidden).float() - exact(hidden, head)).abs().max() > 1e-3  # rounding is seen


def test_a_head_with_a_copy_gets_one_of_its_new_weights() -> None:
    from services.inference.adapters.vllm_head import follow

    torch.manual_seed(1)
    old, hidden = head_of(1.0), torch.randn(5, 64, dtype=torch.bfloat16)
    layer()._apply_head(old, hidden, None)
    new = head_of(2.0)
    new.__dict__["muster_float32"] = old.__dict__["muster_float32"]  # as a shadow's copy has it
    follow(new)

    torch.testing.assert_close(layer()._apply_head(new, hidden, None), exact(hidden, new))


def test_other_modules_get_no_copy() -> None:
    from services.inference.adapters.vllm_head import follow

    module = head_of(1.0)
    follow(module)

    assert "muster_float32" not in module.__dict__


def test_the_head_of_the_models_own_type_is_vllms() -> None:
    head, hidden = head_of(1.0), torch.randn(2, 64, dtype=torch.bfloat16)
    head.quant_method = SimpleNamespace(apply=lambda *given, bias: "vLLM's")  # type: ignore[assignment]

    assert layer(torch.bfloat16)._apply_head(head, hidden, None) == "vLLM's"
