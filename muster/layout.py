"""Episodes as token sequences.

Owns: `Sequence`, made from a trajectory. Promise: every sampled token keeps its log-probability,
its version, its place and what it was chosen from; nothing is re-encoded; what cannot be trained on
truthfully is refused by name. Does not cover: micro-batches (packing.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from muster.errors import InvalidInput
from muster.leased import Trajectory
from muster.segment_codec import UNRECORDED as UNRECORDED
from muster.types import RoutedExperts, SamplingMask, Segment, SegmentKind, Value


class Sequence(Value, frozen=True):
    """Tokens of one trajectory that were one context of the engine.

    `sampled` are positions in `token_ids`; `logprobs`, `versions` and `clean` are parallel to it.
    A token is clean when the KV it attended to was all of its own version. `allowed` are the token
    ids that each sampled token was chosen from (empty: all), in all or in none; `experts` is of
    every token, with `UNRECORDED` ids.
    """

    trajectory: int  # index in the batch
    group: str
    temperature: float
    token_ids: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    clean: tuple[bool, ...]
    allowed: tuple[tuple[int, ...], ...] = ()
    experts: RoutedExperts | None = None

    @property
    def turns(self) -> tuple[int, ...]:
        """Which run of sampled tokens each one is of, counted from 0."""
        turn, found = -1, []
        for at, before in zip(self.sampled, (-2, *self.sampled), strict=False):
            turn += at != before + 1
            found.append(turn)
        return tuple(found)


def lay_out(index: int, item: Trajectory) -> tuple[Sequence, ...]:
    """Sequences of a trajectory, in order.

    Usually one. A PROMPT segment after other kinds means that the context began anew (the prefix
    no longer held), so it begins another sequence; each belongs to the same episode and reward.
    Raises InvalidInput for transforms that cannot be applied here too, or incomplete records.
    """
    check_sampling(item)
    shape = _expert_shape(item)
    found = (_sequence(index, item, segments, shape) for segments in _contexts(item.segments))
    return tuple(sequence for sequence in found if sequence.sampled)


def _sequence(
    index: int, item: Trajectory, segments: list[Segment], shape: tuple[int, int] | None
) -> Sequence:
    tokens: list[int] = []
    sampled: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    clean: list[bool] = []
    allowed: list[tuple[int, ...]] = []
    for segment in segments:
        if segment.kind is SegmentKind.MODEL:
            _check_model_segment(item, segment, context=len(tokens))
            sampled += range(len(tokens), len(tokens) + len(segment.token_ids))
            logprobs += segment.logprobs
            for span in segment.spans:
                versions += [span.version] * (span.end - span.start)
                clean += [span.kv_min_version == span.version] * (span.end - span.start)
            allowed += _allowed(item, segment)
        tokens += segment.token_ids
    return Sequence(
        trajectory=index,
        group=item.group,
        temperature=item.sampling.temperature,
        token_ids=tuple(tokens),
        sampled=tuple(sampled),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        clean=tuple(clean),
        allowed=tuple(allowed) if any(allowed) else (),
        experts=_experts(segments, shape) if shape else None,
    )


def check_sampling(item: Trajectory) -> None:
    """Refuse transforms that cannot be applied on both sides (DESIGN §8).

    Temperature always can; top-p and top-k where the engine told what they left to choose from.
    """
    sampling = item.sampling
    masked = all(s.mask is not None for s in item.segments if s.kind is SegmentKind.MODEL)
    way_out = "let the engine return sampling masks, or sample with {}"
    wrong: tuple[str, object, str] | None = None
    if sampling.top_p != 1.0 and not masked:
        wrong = "top_p", sampling.top_p, way_out.format("top_p = 1")
    elif sampling.top_k != 0 and not masked:
        wrong = "top_k", sampling.top_k, way_out.format("top_k = 0")
    elif not sampling.temperature > 0.0:
        wrong = "temperature", sampling.temperature, "sample with a temperature above 0"
    if wrong:
        raise InvalidInput(
            f"the trainer cannot apply this transform, so {item.id} cannot be trained on",
            field=f"sampling.{wrong[0]}",
            value=wrong[1],
            way_out=wrong[2],
        )


def _contexts(segments: tuple[Segment, ...]) -> Iterator[list[Segment]]:
    current: list[Segment] = []
    for segment in segments:
        if segment.kind is SegmentKind.PROMPT and any(
            s.kind is not SegmentKind.PROMPT for s in current
        ):
            yield current
            current = []
        current.append(segment)
    if current:
        yield current


def _check_model_segment(item: Trajectory, segment: Segment, *, context: int) -> None:
    covered = 0
    for span in segment.spans:
        if span.start != covered or span.end <= span.start:
            break
        covered = span.end
    problem = ""
    if context == 0:
        problem = "sampled tokens need a prompt before them"
    elif len(segment.logprobs) != len(segment.token_ids):
        problem = f"{len(segment.token_ids)} sampled tokens, {len(segment.logprobs)} logprobs"
    elif covered != len(segment.token_ids):
        problem = f"version spans cover {covered} of {len(segment.token_ids)} sampled tokens"
    elif not all(value <= 0.0 for value in segment.logprobs):
        problem = "a log-probability must be a number of at most 0"
    if problem:
        raise InvalidInput(
            problem,
            field="segments",
            value=item.id,
            way_out="record every sampled token with its log-probability and version",
        )


def _allowed(item: Trajectory, segment: Segment) -> list[tuple[int, ...]]:
    """What each token of a MODEL segment was chosen from; it must be one of them itself."""
    mask = segment.mask or SamplingMask((0,) * len(segment.token_ids), ())
    found, start = [], 0
    for count in mask.counts:
        found.append(mask.token_ids[start : start + count])
        start += count
    if len(found) != len(segment.token_ids) or not all(
        not ids or token in ids for token, ids in zip(segment.token_ids, found, strict=True)
    ):
        raise InvalidInput(
            "a sampled token is not among those that its mask left to choose from",
            field="segments.mask",
            value=item.id,
            way_out="record the mask of the sampling step that drew the token",
        )
    return found


def _expert_shape(item: Trajectory) -> tuple[int, int] | None:
    """(layers, per_token) of the recorded routing; None without any."""
    shapes = {(s.experts.layers, s.experts.per_token) for s in item.segments if s.experts}
    for segment in item.segments:
        if segment.experts and segment.experts.tokens != len(segment.token_ids):
            shapes.add((0, segment.experts.tokens))
    if len(shapes) > 1:
        raise InvalidInput(
            f"routing of {item.id} in more than one shape, or not of every token of a segment",
            field="segments.experts",
            value=sorted(shapes),
            way_out="record [tokens, layers, experts per token] of one model",
        )
    return shapes.pop() if shapes else None


def _experts(segments: list[Segment], shape: tuple[int, int]) -> RoutedExperts:
    """Routing of every token; `UNRECORDED` where a segment has none."""
    unknown = UNRECORDED * (shape[0] * shape[1])
    rows = (s.experts.ids if s.experts else unknown * len(s.token_ids) for s in segments)
    return RoutedExperts(*shape, b"".join(rows))
