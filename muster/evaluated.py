"""What an evaluation found out about one group.

Owns: those carriers. Promise: pure; of each sibling the attempt that counts, whatever its outcome.
Does not cover: the wire (evaluated_codec.py), who writes them (the bank, with the group's fate),
figures over groups (evaluation.py).
"""

from __future__ import annotations

from muster.types import OutcomeLabel, SamplingParams, Value

GROUPS_KEPT = 4096
"""Newest entries of the stream that stay in Redis; older ones lie in the history on disk."""


class EvaluatedSibling(Value, frozen=True):
    """The attempt that counts; so many before it were lost to infrastructure."""

    sibling: int
    attempt: int
    label: OutcomeLabel  # outcome, cause, reward and `flaky` alone travel
    turns: int = 0
    prompt_tokens: int = 0  # of all turns: what engines were sent
    sampled_tokens: int = 0
    versions: tuple[int, ...] = ()  # rising
    replicas: tuple[str, ...] = ()  # sorted


class EvaluatedGroup(Value, frozen=True):
    """Times are Unix seconds of the streams."""

    group: str
    job: str
    task: str
    sampling: SamplingParams
    opened_unix_s: float
    complete_unix_s: float
    siblings: tuple[EvaluatedSibling, ...]

    @property
    def versions(self) -> tuple[int, ...]:
        """That its tokens came from, rising."""
        return tuple(sorted({v for sibling in self.siblings for v in sibling.versions}))
