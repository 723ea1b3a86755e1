"""vLLM's words for what goes in and comes out, and Muster's.

Owns: the translation of seeds, parameters, outputs and verbs' arguments. Promise: no I/O; a reply
has either one mask entry for every sampled token or no mask. Does not cover: when anything is asked
(vllm.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from muster.types import FinishReason, RoutedExperts, SamplingMask
from services.inference.engine import Chunk, Finish, Sampling
from services.inference.routing import laid_out
from services.inference.sampling import is_filtered
from services.inference.spans import spans_from_labels


def params_of(request: Sampling, *, experts: bool) -> Any:
    """vLLM's SamplingParams. experts: the engine returns routing, of what is not known yet."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    more = {"routed_experts_prompt_start": request.experts_from} if experts else {}
    return VllmParams(
        temperature=request.params.temperature,
        top_p=request.params.top_p,
        top_k=request.params.top_k,
        seed=seed_of(request.params.seed),
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **more,
    )


def seed_of(seed: int) -> int:
    """vLLM takes a signed 64-bit seed; the same seed always gives the same one."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class Reply:
    """One request's outputs, as they come."""

    def __init__(self, request: Sampling):
        self._request = request
        self._filtered = is_filtered(request.params)
        self._sampled = 0
        self._counts: list[int] = []
        self._kept: list[int] = []

    def chunk(self, piece: Any) -> Chunk:
        """What is new."""
        ids = tuple(int(i) for i in piece.token_ids)
        self._sampled += len(ids)
        for kept in piece.sampling_mask.token_ids if self._has_mask(piece) else ():
            self._counts.append(len(kept))
            self._kept += kept
        rows = zip(ids, piece.logprobs, strict=True)
        return Chunk(ids, tuple(float(row[token].logprob) for token, row in rows))

    def finish(
        self, output: Any, piece: Any, floors: dict[int, int], experts_bytes_max: int
    ) -> Finish:
        """The end; `experts_bytes_max`: larger routing is left out."""
        stats = output.metrics
        labels = [(s.version, s.start, s.end) for s in piece.weight_versions or ()]
        reason = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
        started = bool(stats and stats.first_token_ts)
        experts, dropped = self._experts(piece, experts_bytes_max)
        return Finish(
            reason=reason.get(piece.finish_reason, FinishReason.ABORT),
            spans=spans_from_labels(labels, floors),
            cached_tokens=int(output.num_cached_tokens or 0),
            queue_s=max(0.0, stats.scheduled_ts - stats.queued_ts) if started else 0.0,
            prefill_s=max(0.0, stats.first_token_ts - stats.scheduled_ts) if started else 0.0,
            decode_s=max(0.0, stats.last_token_ts - stats.first_token_ts) if started else 0.0,
            experts=experts,
            experts_from=self._request.experts_from if experts else 0,
            experts_dropped=dropped,
            mask=self._mask(),
        )

    def _has_mask(self, piece: Any) -> bool:
        return self._filtered and piece.sampling_mask is not None

    def _mask(self) -> SamplingMask | None:
        if not self._filtered or len(self._counts) != self._sampled:
            return None
        return SamplingMask(tuple(self._counts), tuple(self._kept))

    def _experts(self, piece: Any, bytes_max: int) -> tuple[RoutedExperts | None, bool]:
        rows = piece.routed_experts
        if rows is None:
            return None, False
        tokens = len(self._request.prompt) + self._sampled - self._request.experts_from
        if 2 * tokens * rows.shape[1] * rows.shape[2] > bytes_max:
            return None, True
        return laid_out(rows.astype("<u2").tobytes(), rows.shape[1], rows.shape[2], tokens), False
