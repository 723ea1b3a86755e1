"""What top-p and top-k left to choose from, taken where the sampler of a CPU engine chooses.

Owns: `KeptTokens`. Promise: exactly the ids that had a finite logit when the token was drawn, ties
of the last one included; a request without such a filter costs nothing and has none.
Does not cover: how many there may be (sampling.py bounds top_k), the way to the request
(vllm_scheduler.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplingMaskLists


class KeptTokens:
    """Of the newest step of one sampler, whose log-probabilities are those after all filters."""

    def __init__(self, sampler: Any):
        """sampler: vLLM's, with logprobs_mode "processed_logprobs"."""
        chooser = sampler.topk_topp_sampler
        self._choose = chooser.forward
        self._kept: SamplingMaskLists | None = None
        chooser.forward = self._forward

    def take(self) -> SamplingMaskLists | None:
        """Row by row of the step that was just sampled; None when no row had a filter."""
        kept, self._kept = self._kept, None
        return kept

    def _forward(self, logits: Any, generators: Any, k: Any, p: Any) -> Any:
        vocabulary = logits.shape[-1]
        sampled, logprobs = self._choose(logits, generators, k, p)
        if k is not None or p is not None:
            self._kept = kept(logprobs, filtered(k, p, vocabulary))
        return sampled, logprobs


def filtered(k: Any, p: Any, vocabulary: int) -> Any:
    """Which rows have a filter, bool [n]. k, p: [n], or None where no row has it."""
    of_k = None if k is None else k < vocabulary
    of_p = None if p is None else p < 1.0
    if of_k is None or of_p is None:
        return of_p if of_k is None else of_k
    return of_k | of_p


def kept(logprobs: Any, rows: Any) -> SamplingMaskLists:
    """Ids with a finite log-probability in the chosen rows of [n, vocabulary]; none in others."""
    row, ids = torch.nonzero(torch.isfinite(logprobs[rows]), as_tuple=True)
    chosen = torch.zeros(len(logprobs), dtype=torch.int64)
    chosen[rows] = torch.bincount(row, minlength=int(rows.sum()))
    offsets = np.zeros(len(logprobs) + 1, dtype=np.int64)
    np.cumsum(chosen.numpy(), out=offsets[1:])
    return SamplingMaskLists(ids.to(torch.int32).numpy(), offsets)
