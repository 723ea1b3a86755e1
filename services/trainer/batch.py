"""A leased batch, and its episodes laid out as token sequences.

Owns: `FrozenBatch`, `TrainBatch`, `Trajectory`, `Sequence`. Promise: every sampled token keeps its
log-probability, its version and its place; nothing is re-encoded; what cannot be trained on
truthfully is refused by name. Does not cover: micro-batches (packing.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from muster.errors import InvalidInput
from muster.types import OutcomeLabel, SamplingParams, Segment, SegmentKind, Value


class Trajectory(Value, frozen=True):
    """The record of the attempt that counts for one sibling."""

    group: str
    task: str
    sibling: int
    attempt: int
    label: OutcomeLabel
    segments: tuple[Segment, ...]
    sampling: SamplingParams

    @property
    def id(self) -> str:
        """`group.sibling.attempt`, unique within the run."""
        return f"{self.group}.{self.sibling}.{self.attempt}"


class BatchMember(Value, frozen=True):
    """A group, and the attempt that counts for each sibling, in sibling order."""

    group: str
    attempts: tuple[int, ...]


class FrozenBatch(Value, frozen=True):
    """The bank's record of a step, as it was leased. A checkpoint keeps that of its own step and
    brings it back to a bank that has lost it."""

    step: int
    members: tuple[BatchMember, ...]
    asked_unix_s: float = 0.0
    complete_unix_s: float = 0.0
    trainer_epoch: int = 0
    policy_version: int = 0


class TrainBatch(Value, frozen=True):
    """The groups of one step, frozen by the bank."""

    frozen: FrozenBatch
    trajectories: tuple[Trajectory, ...]

    @property
    def step(self) -> int:
        """Which step it is for."""
        return self.frozen.step

    @property
    def groups(self) -> tuple[str, ...]:
        """Ids of its groups."""
        return tuple(member.group for member in self.frozen.members)


class Sequence(Value, frozen=True):
    """Tokens of one trajectory that were one context of the engine.

    `sampled` are positions in `token_ids`; `logprobs`, `versions` and `clean` are parallel to it.
    A token is clean when the KV it attended to was all of its own version.
    """

    trajectory: int  # index in the batch
    group: str
    temperature: float
    token_ids: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    clean: tuple[bool, ...]


def lay_out(index: int, item: Trajectory) -> tuple[Sequence, ...]:
    """Sequences of a trajectory, in order.

    Usually one. A PROMPT segment after other kinds means that the context began anew (the prefix
    no longer held), so it begins another sequence; each belongs to the same episode and reward.
    Raises InvalidInput for transforms that the trainer does not apply, or incomplete records.
    """
    check_sampling(item)
    sequences = []
    for segments in _contexts(item.segments):
        tokens: list[int] = []
        sampled: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        clean: list[bool] = []
        for segment in segments:
            if segment.kind is SegmentKind.MODEL:
                _check_model_segment(item, segment, context=len(tokens))
                sampled += range(len(tokens), len(tokens) + len(segment.token_ids))
                logprobs += segment.logprobs
                for span in segment.spans:
                    versions += [span.version] * (span.end - span.start)
                    clean += [span.kv_min_version == span.version] * (span.end - span.start)
            tokens += segment.token_ids
        if sampled:
            sequences.append(
                Sequence(
                    trajectory=index,
                    group=item.group,
                    temperature=item.sampling.temperature,
                    token_ids=tuple(tokens),
                    sampled=tuple(sampled),
                    logprobs=tuple(logprobs),
                    versions=tuple(versions),
                    clean=tuple(clean),
                )
            )
    return tuple(sequences)


def check_sampling(item: Trajectory) -> None:
    """Refuse transforms that would have to be applied on both sides (DESIGN §8)."""
    sampling = item.sampling
    wrong: tuple[str, object, str] | None = None
    if sampling.top_p != 1.0:
        wrong = "top_p", sampling.top_p, "sample with top_p = 1"
    elif sampling.top_k != 0:
        wrong = "top_k", sampling.top_k, "sample with top_k = 0"
    elif not sampling.temperature > 0.0:
        wrong = "temperature", sampling.temperature, "sample with a temperature above 0"
    if wrong:
        raise InvalidInput(
            f"the trainer does not apply this transform, so {item.id} cannot be trained on",
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
