"""Log-probabilities of a micro-batch's sampled tokens.

Owns: the forward pass over a flat row, and the head over the rows that predict a sampled token.
Promise: numbers equal those of one plain pass per sequence; the logits of at most `logit_rows`
tokens exist at a time, also in the backward pass. Does not cover: packing (packing.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from muster.errors import InvalidInput
from services.trainer.packing import TRUNK, MicroBatch


class Scorer:
    """Runs a causal language model of transformers over micro-batches."""

    def __init__(self, model: Any, logit_rows: int):
        self._body, self._head = model.base_model, model.get_output_embeddings()
        self._positions = int(model.config.max_position_embeddings)
        self._logit_rows = logit_rows

    def logprobs(self, row: MicroBatch, temperatures: Tensor) -> Tensor:
        """log π(target) of each pick at its temperature; shapes [picks], float32.

        Raises InvalidInput for a sequence longer than the model's positions.
        """
        if max(row.positions) >= self._positions:
            raise InvalidInput(
                f"the model has {self._positions} positions",
                field="sequence length",
                value=max(row.positions) + 1,
                way_out="lower the episodes' token budget",
            )
        hidden = self._body(
            input_ids=torch.tensor([row.token_ids]),
            position_ids=torch.tensor([row.positions]),
            attention_mask=None if row.is_causal else attention_mask(row),
            use_cache=False,
        ).last_hidden_state[0]
        sources = torch.tensor([pick.source for pick in row.picks])
        targets = torch.tensor([pick.target for pick in row.picks])
        pieces = zip(
            hidden[sources].split(self._logit_rows),
            targets.split(self._logit_rows),
            temperatures.split(self._logit_rows),
            strict=True,
        )
        # The logits of a piece are made again in the backward pass: kept, they would be rows x
        # vocabulary in float32 for the whole micro-batch.
        return torch.cat([checkpoint(self._score, *piece, use_reentrant=False) for piece in pieces])

    def _score(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        logits = self._head(hidden).float() / temperatures[:, None]
        return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)


def attention_mask(row: MicroBatch) -> Tensor:
    """Who sees whom, shape [1, 1, L, L], True = attends (see MicroBatch)."""
    trees, branches = torch.tensor(row.trees), torch.tensor(row.branches)
    same_tree = trees[:, None] == trees[None, :]
    reaches = (branches[None, :] == TRUNK) | (branches[:, None] == branches[None, :])
    causal = torch.ones(len(trees), len(trees), dtype=torch.bool).tril()
    return (same_tree & reaches & causal)[None, None]
