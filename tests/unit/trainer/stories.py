"""Batches for trainer tests, built from rewards and token lists."""

from __future__ import annotations

from collections.abc import Sequence

from muster.leased import BatchMember, FrozenBatch, TrainBatch, Trajectory
from muster.types import Outcome, OutcomeLabel, SamplingParams, Segment, SegmentKind, VersionSpan

PROMPT = (5, 6, 7, 8)


def prompt(*ids: int) -> Segment:
    return Segment(SegmentKind.PROMPT, ids or PROMPT)


def sampled(*ids: int, version: int = 0, logprob: float = -3.0, kv: int | None = None) -> Segment:
    span = VersionSpan(version, 0, len(ids), version if kv is None else kv)
    return Segment(SegmentKind.MODEL, ids, (logprob,) * len(ids), (span,))


def observed(*ids: int) -> Segment:
    return Segment(SegmentKind.OBSERVATION, ids)


def label(reward: float | None, outcome: Outcome = Outcome.MODEL_SUCCESS) -> OutcomeLabel:
    return OutcomeLabel(outcome, "verdict", reward=reward)


def trajectory(
    group: str,
    sibling: int,
    reward: float | None,
    segments: Sequence[Segment] = (),
    *,
    outcome: Outcome = Outcome.MODEL_SUCCESS,
    sampling: SamplingParams | None = None,
) -> Trajectory:
    return Trajectory(
        group=group,
        task="task",
        sibling=sibling,
        attempt=0,
        label=label(reward, outcome),
        segments=tuple(segments) or (prompt(), sampled(10 + sibling, 11)),
        sampling=sampling or SamplingParams(),
    )


def group(name: str, *rewards: float | None) -> list[Trajectory]:
    """One sibling per reward; None stands for an infrastructure failure."""
    return [
        trajectory(
            name,
            i,
            reward,
            outcome=Outcome.INFRA_FAILURE if reward is None else Outcome.MODEL_SUCCESS,
        )
        for i, reward in enumerate(rewards)
    ]


def batch(*trajectories: Trajectory, step: int = 1) -> TrainBatch:
    attempts: dict[str, list[int]] = {}
    for item in trajectories:
        attempts.setdefault(item.group, []).append(item.attempt)
    members = tuple(BatchMember(name, tuple(tried)) for name, tried in attempts.items())
    return TrainBatch(FrozenBatch(step, members), tuple(trajectories))
