"""Groups of evaluations as they lie on stream `evaluations`, and back.

Owns: that mapping. Promise: lossless for what travels (of a label: outcome, cause, reward, flaky).
Does not cover: the carriers (evaluated.py).
"""

from __future__ import annotations

from muster import codec
from muster.evaluated import EvaluatedGroup, EvaluatedSibling
from muster.types import EpisodeKey, OutcomeLabel
from muster.v1 import events_pb2 as ev


def to_pb(run: str, found: EvaluatedGroup) -> ev.EvaluatedGroup:
    return ev.EvaluatedGroup(
        run=run,
        group=found.group,
        job=found.job,
        task=found.task,
        sampling=codec.sampling_to_pb(found.sampling),
        opened_unix_s=found.opened_unix_s,
        complete_unix_s=found.complete_unix_s,
        siblings=[_sibling_to_pb(sibling) for sibling in found.siblings],
    )


def from_pb(message: ev.EvaluatedGroup) -> EvaluatedGroup:
    """Raises InvalidInput for an outcome that is none."""
    return EvaluatedGroup(
        message.group,
        message.job,
        message.task,
        codec.sampling_from_pb(message.sampling),
        message.opened_unix_s,
        message.complete_unix_s,
        tuple(_sibling_from_pb(sibling) for sibling in message.siblings),
    )


def _sibling_to_pb(s: EvaluatedSibling) -> ev.EvaluatedSibling:
    label = codec.label_to_pb(EpisodeKey("", "", s.sibling, s.attempt, 0), s.label)
    return ev.EvaluatedSibling(
        sibling=s.sibling,
        attempt=s.attempt,
        outcome=label.outcome,
        cause=label.cause,
        has_reward=label.has_reward,
        reward=label.reward,
        turns=s.turns,
        prompt_tokens=s.prompt_tokens,
        sampled_tokens=s.sampled_tokens,
        versions=s.versions,
        replicas=s.replicas,
        flaky=label.flaky,
    )


def _sibling_from_pb(m: ev.EvaluatedSibling) -> EvaluatedSibling:
    reward = m.reward if m.has_reward else None
    return EvaluatedSibling(
        m.sibling,
        m.attempt,
        OutcomeLabel(codec.outcome_from_pb(m.outcome), m.cause, reward, flaky=m.flaky),
        m.turns,
        m.prompt_tokens,
        m.sampled_tokens,
        tuple(m.versions),
        tuple(m.replicas),
    )
