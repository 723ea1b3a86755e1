"""vLLM's words for what goes in and comes out, and Muster's.

Owns: the translation of seeds, outputs and verbs' arguments. Promise: pure. Does not cover: when
anything is asked (vllm.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from muster.types import FinishReason
from services.inference.engine import Chunk, Finish
from services.inference.spans import spans_from_labels


def seed_of(seed: int) -> int:
    """vLLM takes a signed 64-bit seed; the same seed always gives the same one."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def chunk_of(piece: Any) -> Chunk:
    ids = tuple(int(i) for i in piece.token_ids)
    rows = zip(ids, piece.logprobs, strict=True)
    return Chunk(ids, tuple(float(row[token].logprob) for token, row in rows))


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def finish_of(output: Any, piece: Any, floors: dict[int, int]) -> Finish:
    stats = output.metrics
    labels = [(s.version, s.start, s.end) for s in piece.weight_versions or ()]
    reason = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
    started = bool(stats and stats.first_token_ts)
    return Finish(
        reason=reason.get(piece.finish_reason, FinishReason.ABORT),
        spans=spans_from_labels(labels, floors),
        cached_tokens=int(output.num_cached_tokens or 0),
        queue_s=max(0.0, stats.scheduled_ts - stats.queued_ts) if started else 0.0,
        prefill_s=max(0.0, stats.first_token_ts - stats.scheduled_ts) if started else 0.0,
        decode_s=max(0.0, stats.last_token_ts - stats.first_token_ts) if started else 0.0,
    )
