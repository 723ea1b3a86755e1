"""What other processes answered, made safe to keep.

Owns: figures and choices of an answer, checked. Promise: a turn that was sampled with top-p or
top-k has its mask, or it failed: the trainer could not learn from it; routing that does not fit its
tokens is left out, for the model can route by itself. Does not cover: tokens and versions
(replicas.py).
"""

from __future__ import annotations

import math

from muster import segment_codec, telemetry
from muster.errors import InvalidInput, Unavailable
from muster.types import RoutedExperts, SamplingMask, SamplingParams
from muster.v1 import inference_pb2 as inf
from services.router.told import Told

_log = telemetry.logger("router.replies")


def told_of(finish: inf.GenerateFinish, sampling: SamplingParams, context: int, ids: int) -> Told:
    """finish: of a reply with `ids` tokens to a context of so many. Raises Unavailable."""
    mask = _mask(finish, ids)
    cut = sampling.top_p < 1.0 or sampling.top_k > 0
    if mask is None and ids and cut and sampling.top_k != 1:  # one choice needs no telling
        raise Unavailable(
            "the replica does not tell what top-p and top-k left to choose from",
            field="mask",
            value="none",
            way_out="use replicas that do (inference.mask_ids_max), or sample with top_p = 1 and "
            "top_k = 0",
        )
    start = finish.experts_from
    return Told(mask, _experts(finish, context + ids - start), start)


def _mask(finish: inf.GenerateFinish, ids: int) -> SamplingMask | None:
    if not finish.HasField("mask"):
        return None
    try:
        mask = segment_codec.mask_from_pb(finish.mask)
    except InvalidInput as error:
        raise Unavailable(f"the replica's sampling mask cannot be read: {error}") from error
    if len(mask.counts) != ids:
        raise Unavailable(f"the replica told masks of {len(mask.counts)} tokens, not of {ids}")
    return mask


def _experts(finish: inf.GenerateFinish, tokens: int) -> RoutedExperts | None:
    if not finish.HasField("experts"):
        return None
    try:
        experts = segment_codec.experts_from_pb(finish.experts)
    except InvalidInput as error:
        _log.warning("a replica's routing is left out: %s", error)
        return None
    if finish.experts_from < 0 or experts.tokens != tokens:
        _log.warning(
            "a replica's routing of %d tokens is left out: not of %d", experts.tokens, tokens
        )
        return None
    return experts


def told_s(value: float) -> float:
    """A duration that a kernel may not tell: -1 says so, and stays what it is."""
    return value if value == -1.0 else seconds(value)


def seconds(value: float) -> float:
    """A duration of another process as a finite number of seconds; journals hold no NaN."""
    return value if math.isfinite(value) and value > 0 else 0.0


def reward(value: float) -> float:
    """A reward that is no number becomes one that is out of range: it is judged as such."""
    return value if math.isfinite(value) else -1.0
