"""The output head of a CPU engine in float32.

Owns: the float32 copy of the head's weights, and its use. vLLM's own float32 head converts the
weights anew in each step on a CPU, which takes longer than the product itself; here they are
converted once for each version, for new ones while the engine still decodes (vllm_shadow.py).
Promise: the logits are those of the weights served, products of bfloat16 weights and hidden states
taken exactly and added in float32, as the trainer does it. Does not cover: GPUs (vLLM adds up in
float32 there without a copy), heads that are quantized (vLLM refuses them).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor

_COPY = "muster_float32"
"""Attribute of a head module: its weights in float32."""


def use_float32_heads() -> None:
    """Models that are built from now on in this process have such heads where configured."""
    from vllm.model_executor.custom_op import op_registry_oot

    if LogitsProcessor.__name__ not in op_registry_oot:
        LogitsProcessor.register_oot(Float32Head, name=LogitsProcessor.__name__)


class Float32Head(LogitsProcessor):  # type: ignore[misc] # vLLM is untyped here
    """vLLM's, with a float32 product from a copy that is kept."""

    def _apply_head(self, lm_head: Any, hidden_states: Any, embedding_bias: Any) -> Any:
        if (
            self.head_dtype != torch.float32
            or hidden_states.dtype == torch.float32
            or not _is_plain(lm_head)
        ):
            return super()._apply_head(lm_head, hidden_states, embedding_bias)
        if _COPY not in lm_head.__dict__:
            lm_head.__dict__[_COPY] = _copy(lm_head)
        bias = None if embedding_bias is None else embedding_bias.float()
        return torch.nn.functional.linear(hidden_states.float(), lm_head.__dict__[_COPY], bias)


def follow(twin: Any) -> None:
    """A module that takes another's place with new weights: its copy is of these."""
    if _COPY in twin.__dict__:
        twin.__dict__[_COPY] = _copy(twin)


def renew(head: Any) -> bool:
    """The weights of this module have changed where they are: so does its copy, if it has one.
    True when it has: nothing else of this module is used then."""
    if _COPY not in head.__dict__:
        return False
    with torch.inference_mode():  # it may have been made in that mode, by a step
        head.__dict__[_COPY].copy_(head.weight)
    return True


def _copy(head: Any) -> torch.Tensor:
    return head.weight.detach().float()


def _is_plain(head: Any) -> bool:
    weight = getattr(head, "weight", None)
    return weight is not None and weight.dtype in (torch.bfloat16, torch.float16)
