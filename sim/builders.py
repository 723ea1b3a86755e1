"""Short ways to make the events of groups and episodes.

Owns: defaults that make a group trainable. Times are seconds; one time for all events of an
attempt unless given.
"""

from __future__ import annotations

from muster.types import EpisodeKey, Outcome, OutcomeLabel, SamplingParams, VersionSpan
from services.readybank import events as e

RUN = "sim"
INFRA = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
UNKNOWN = OutcomeLabel(Outcome.UNKNOWN, "no rule")


def scored(reward: float) -> OutcomeLabel:
    """A valid label."""
    if reward >= 1.0:
        return OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", reward)
    return OutcomeLabel(Outcome.MODEL_FAILURE, "not_passed", reward)


def key(group: str, sibling: int, attempt: int = 0, owner: int = 1) -> EpisodeKey:
    return EpisodeKey(RUN, group, sibling, attempt, owner)


def opened(
    group: str, size: int, *, job: str = "job", owner: int = 1, at: float = 0.0
) -> e.GroupOpened:
    return e.GroupOpened(group, job, "task", size, SamplingParams(), owner, at)


def turn(
    episode: EpisodeKey, number: int, *, tokens: int = 4, version: int = 0, at: float = 0.0
) -> e.TurnRecorded:
    """A turn whose `tokens` sampled tokens all come from `version`."""
    spans = (VersionSpan(version, 0, tokens, version),) if tokens else ()
    return e.TurnRecorded(episode, number, f"p:{episode.id}.{number}", tokens, spans, at)


def attempt(
    episode: EpisodeKey,
    label: OutcomeLabel,
    *,
    turns: int = 1,
    version: int = 0,
    at: float = 0.0,
) -> tuple[list[e.BankEvent], e.LabelRecorded]:
    """Everything of one attempt: what the events stream gets, and the label for the other one."""
    events: list[e.BankEvent] = [turn(episode, n, version=version, at=at) for n in range(turns)]
    events.append(e.EpisodeRecorded(episode, turns, at))
    return events, e.LabelRecorded(episode, label, at)
