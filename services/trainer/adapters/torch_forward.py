"""Log-probabilities of a micro-batch's sampled tokens.

Owns: the forward pass over a flat row. Promise: numbers equal those of one plain pass per sequence,
as the engine sampled: at its temperature, from what its masks left, through the experts it chose.
Does not cover: the head (torch_head.py), routing (torch_experts.py), packing (packing.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muster.errors import ConfigError, InvalidInput
from services.trainer.adapters.torch_experts import Replay
from services.trainer.adapters.torch_head import Allowed, HeadSettings, logprobs
from services.trainer.packing import TRUNK, MicroBatch

_AFTER_HEAD = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""What some models do to their logits, and the value at which it changes nothing."""


class Scorer:
    """Runs a causal language model of transformers over micro-batches."""

    def __init__(self, model: Any, settings: HeadSettings):
        for name, neutral in _AFTER_HEAD.items():
            if (value := getattr(model.config, name, neutral)) not in (None, neutral):
                raise ConfigError(
                    "the trainer does not apply this to logits, so its log-probabilities would "
                    "not be the engine's",
                    field=f"model.{name}",
                    value=value,
                    way_out="train a model without it",
                )
        self._body, self._head = model.base_model, model.get_output_embeddings()
        self._positions = int(model.config.max_position_embeddings)
        self._settings, self._replay = settings, Replay(model)

    def logprobs(self, row: MicroBatch, temperatures: Tensor) -> Tensor:
        """log π(target) of each pick at its temperature; shapes [picks], float32.

        Raises InvalidInput for a sequence longer than the model's positions, and for routing that
        is not of this model.
        """
        if max(row.positions) >= self._positions:
            raise InvalidInput(
                f"the model has {self._positions} positions",
                field="sequence length",
                value=max(row.positions) + 1,
                way_out="lower the episodes' token budget",
            )
        self._replay.follow(row.experts)
        hidden = self._body(
            input_ids=torch.tensor([row.token_ids]),
            position_ids=torch.tensor([row.positions]),
            attention_mask=None if row.is_causal else attention_mask(row),
            use_cache=False,
        ).last_hidden_state[0]
        return logprobs(
            hidden[torch.tensor([pick.source for pick in row.picks])],
            self._head,
            torch.tensor([pick.target for pick in row.picks]),
            temperatures,
            Allowed.of([pick.allowed for pick in row.picks]),
            self._settings,
        )


def attention_mask(row: MicroBatch) -> Tensor:
    """Who sees whom, shape [1, 1, L, L], True = attends (see MicroBatch)."""
    trees, branches = torch.tensor(row.trees), torch.tensor(row.branches)
    same_tree = trees[:, None] == trees[None, :]
    reaches = (branches[None, :] == TRUNK) | (branches[:, None] == branches[None, :])
    causal = torch.ones(len(trees), len(trees), dtype=torch.bool).tril()
    return (same_tree & reaches & causal)[None, None]
