"""The output head: log-probabilities of chosen tokens from hidden states.

Owns: logits, temperature, top-p and top-k masks, the softmax, and their gradient. Promise: exact,
forwards and backwards, whatever the sizes of pieces; never more than `rows` x `columns` logits
exist at a time, nor more of the weight in the head's type than `columns` rows.
Does not cover: the model below the head (torch_forward.py).

log π(t) = z_t − log Σ_{j ∈ allowed} exp z_j,   z = h Wᵀ / T

in `dtype`, the softmax in float32. The backward pass makes z again, piece by piece:
∂/∂z_j = [j = t] − π(j). Its products are in the type of the hidden states, to which their results
are rounded anyhow. One function for all pieces, so that the gradient of the weight is written once;
slices of it under autograd would each claim the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from muster.types import Value


class HeadSettings(Value, frozen=True):
    """Type of the product, and the sizes of pieces: sampled tokens, vocabulary entries."""

    dtype: str = "float32"
    rows: int = 256
    columns: int = 16384


class Allowed(Value, frozen=True):
    """Which ids the masked rows may choose from, as pairs (row, id); the other rows: all."""

    masked: Tensor  # bool [n]
    rows: Tensor
    ids: Tensor

    @classmethod
    def of(cls, allowed: Many[tuple[int, ...]]) -> Allowed | None:
        """Per row its ids, empty for all; None when no row has a mask."""
        if not any(allowed):
            return None
        counts = torch.tensor([len(ids) for ids in allowed])
        return cls(
            counts > 0,
            torch.arange(len(allowed)).repeat_interleave(counts),
            torch.tensor([id for ids in allowed for id in ids]),
        )

    def close(self, logits: Tensor, row: int, column: int) -> None:
        """−inf for what the rows from `row` on may not choose of the ids from `column` on."""
        height, width = logits.shape
        here = (self.rows >= row) & (self.rows < row + height)
        here &= (self.ids >= column) & (self.ids < column + width)
        shut = self.masked[row : row + height, None].expand(height, width).clone()
        shut[self.rows[here] - row, self.ids[here] - column] = False
        logits.masked_fill_(shut, -torch.inf)


def logprobs(
    hidden: Tensor,
    head: Any,
    targets: Tensor,
    temperatures: Tensor,
    allowed: Allowed | None,
    settings: HeadSettings,
) -> Tensor:
    """log π(target) per row, float32 [n]. `hidden` [n, width], `head` a linear layer."""
    found: Tensor = _LogProbs.apply(
        hidden, head.weight, head.bias, targets, temperatures, allowed, settings
    )
    return found


class _Pieces:
    """Walks over the logits of all rows, `columns` of the vocabulary at a time."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures: Tensor,
        allowed: Allowed | None,
        settings: HeadSettings,
    ):
        self.dtype = getattr(torch, settings.dtype)
        self.exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.hidden = hidden.to(self.dtype)
        self._weight, self._bias = weight, bias
        self._heat = temperatures.to(self.exact)[:, None]
        self._allowed, self._set = allowed, settings

    def columns(self) -> Iterator[tuple[slice, Tensor]]:
        """A stretch of the vocabulary and its weights, [columns, width]."""
        for start in range(0, len(self._weight), self._set.columns):
            part = slice(start, min(start + self._set.columns, len(self._weight)))
            yield part, self._weight[part].to(self.dtype)

    def rows(self, part: slice, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their logits of that stretch, tempered and masked, [rows, columns]."""
        for start in range(0, len(self.hidden), self._set.rows):
            at = slice(start, min(start + self._set.rows, len(self.hidden)))
            logits = (self.hidden[at] @ weight.T).to(self.exact)
            if self._bias is not None:
                logits += self._bias[part].to(self.exact)
            logits /= self._heat[at]
            if self._allowed is not None:
                self._allowed.close(logits, at.start, part.start)
            yield at, logits


def _inside(targets: Tensor, at: slice, part: slice) -> tuple[Tensor, Tensor]:
    """Rows of this piece whose target lies in this stretch: (row, column) in the piece."""
    column = targets[at] - part.start
    row = ((column >= 0) & (column < part.stop - part.start)).nonzero()[:, 0]
    return row, column[row]


class _LogProbs(torch.autograd.Function):  # type: ignore[misc]  # untyped base
    """See the module."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        allowed: Allowed | None,
        settings: HeadSettings,
    ) -> Tensor:
        pieces = _Pieces(hidden, weight, bias, temperatures, allowed, settings)
        total = torch.full((len(hidden),), -torch.inf, dtype=pieces.exact)
        chosen = torch.zeros_like(total)
        for part, columns in pieces.columns():
            for at, logits in pieces.rows(part, columns):
                total[at] = torch.logaddexp(total[at], logits.logsumexp(1))
                row, column = _inside(targets, at, part)
                chosen[at][row] = logits[row, column]
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, total)
        ctx.allowed, ctx.settings = allowed, settings
        return chosen - total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, total = ctx.saved_tensors
        pieces = _Pieces(hidden, weight, bias, temperatures, ctx.allowed, ctx.settings)
        scale = (grads[0] / temperatures).to(pieces.exact)
        for_hidden = torch.zeros(hidden.shape, dtype=pieces.exact)
        for_weight = torch.empty_like(weight)
        for_bias = None if bias is None else torch.empty_like(bias)
        for part, columns in pieces.columns():
            in_part = torch.zeros(columns.shape, dtype=pieces.exact)
            bias_part = torch.zeros(len(columns), dtype=pieces.exact)
            for at, logits in pieces.rows(part, columns):
                step = logits.sub_(total[at, None]).exp_().mul_(-scale[at, None])
                row, column = _inside(targets, at, part)
                step[row, column] += scale[at][row]
                bias_part += step.sum(0)
                step = step.to(hidden.dtype)
                for_hidden[at] += step @ weight[part]
                in_part += step.T @ hidden[at]
            for_weight[part] = in_part
            if for_bias is not None:
                for_bias[part] = bias_part
        return for_hidden.to(hidden.dtype), for_weight, for_bias, None, None, None, None
