"""What a restarted router makes of the streams: which siblings are final, which run again.

Owns: one pure function. Promise: the newest attempt decides; an attempt that was cut by the end
of its router is followed by the next one, so no turn is ever written twice under one key.
Does not cover: reading and decoding (adapters/durable.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from muster.types import OutcomeLabel, Value
from services.router.events import SiblingRestored


class AttemptSeen(Value, frozen=True):
    """What the streams hold of one attempt."""

    sibling: int
    attempt: int
    turns: int = 0
    finished: bool = False


def restore_siblings(
    group_size: int,
    seen: Iterable[AttemptSeen],
    labels: Mapping[tuple[int, int], OutcomeLabel],
    repairs_max: int,
) -> tuple[SiblingRestored, ...]:
    """State of each sibling, in order. `labels` by (sibling, attempt)."""
    newest: dict[int, AttemptSeen] = {}
    for attempt in seen:
        known = newest.get(attempt.sibling)
        if known is None or attempt.attempt >= known.attempt:
            newest[attempt.sibling] = attempt
    return tuple(_restore(newest.get(n), labels, repairs_max) for n in range(group_size))


def _restore(
    seen: AttemptSeen | None, labels: Mapping[tuple[int, int], OutcomeLabel], repairs_max: int
) -> SiblingRestored:
    if seen is None:
        return SiblingRestored(0)
    label = labels.get((seen.sibling, seen.attempt)) if seen.finished else None
    final = label is not None and (label.outcome.valid or seen.attempt >= repairs_max)
    if final:
        return SiblingRestored(seen.attempt, label, seen.turns)
    return SiblingRestored(seen.attempt + 1)
