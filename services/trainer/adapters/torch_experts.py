"""Recorded routing in the forward pass of a mixture-of-experts model.

Owns: the routers of a model of transformers, while a micro-batch passes. Promise: a token goes to
the experts that it went to in the engine; their weights are this model's own, so the gradient
reaches the router; a token without a record is routed by the model itself.
Does not cover: how the record travels (layout.py, packing.py).

R3 (2510.11370): g_i = I_i e^{s_i} / Σ_j I_j e^{s_j}, I from the engine, s the logits here. Models
that do not normalise over the chosen experts keep their own denominator, Σ_j e^{s_j} over all.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from muster.errors import InvalidInput
from muster.types import RoutedExperts

_ROUTER = "TopKRouter"
"""How transformers ends the names of routers that answer (logits, weights, ids)."""
_UNRECORDED = 0xFFFF


class Replay:
    """Hooks on every router. What `follow` set stays until the next call: a layer that is computed
    again in the backward pass needs it too."""

    def __init__(self, model: Any):
        self._layers: list[int] = []
        self._per_token = self._experts = 0
        self._chosen: Tensor | None = None  # [tokens, routers, per_token], −1 where not recorded
        for name, module in model.named_modules():
            if type(module).__name__.endswith(_ROUTER):
                numbers = re.findall(r"\.(\d+)\.", name)
                self._layers.append(int(numbers[0]) if numbers else len(self._layers))
                self._per_token, self._experts = module.top_k, module.num_experts
                module.register_forward_hook(self._hook(len(self._layers) - 1))

    def follow(self, experts: RoutedExperts | None) -> None:
        """Route the next passes like this, token by token of the row; None: by themselves.

        Raises InvalidInput for a record that is not of this model.
        """
        if experts is None:
            self._chosen = None
            return
        shape = (experts.tokens, experts.layers, experts.per_token)
        ids = torch.frombuffer(bytearray(experts.ids), dtype=torch.uint16).to(torch.long)
        ids = ids.reshape(shape)
        if experts.layers != len(self._layers):  # of every layer, dense ones too
            layers = [layer for layer in self._layers if layer < experts.layers]
            ids = ids[:, layers]
        known = ids[ids != _UNRECORDED]
        if (
            ids.shape[1:] != (len(self._layers), self._per_token)
            or not self._layers
            or (known.numel() and int(known.max()) >= self._experts)
        ):
            raise InvalidInput(
                f"the model has {len(self._layers)} routers that choose {self._per_token} of "
                f"{self._experts} experts, or none whose choice can be set",
                field="segments.experts",
                value=shape,
                way_out="record the routing of the model that is trained, or switch that off",
            )
        self._chosen = ids.masked_fill(ids == _UNRECORDED, -1)

    def _hook(self, place: int) -> Any:
        def replace(router: Any, _: Any, answer: tuple[Tensor, Tensor, Tensor]) -> Any:
            if self._chosen is None:
                return None
            logits, weights, own = answer
            wanted = self._chosen[:, place]
            known = (wanted >= 0).all(1, keepdim=True)
            ids = torch.where(known, wanted, own)
            chosen = logits.float().softmax(-1).gather(1, ids)
            if getattr(router, "norm_topk_prob", True):
                chosen = chosen / chosen.sum(1, keepdim=True)
            return logits, torch.where(known, chosen.to(weights.dtype), weights), ids

        return replace
