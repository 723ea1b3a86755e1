"""What became durable in a simulation.

Owns: `Facts` of a run, `Attempt` of one try at a sibling. Promise: nothing is taken out of them
when streams are trimmed. Does not cover: what must hold of them (checks.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from muster.types import Fate, OutcomeLabel
from muster.v1 import events_pb2 as ev


@dataclass
class Attempt:
    """What is durable of one attempt."""

    turns: dict[int, ev.TurnFinished] = field(default_factory=dict)
    intents: set[int] = field(default_factory=set)
    turns_total: int | None = None
    label: OutcomeLabel | None = None
    restored: int = 0


@dataclass
class Facts:
    """All that ever became durable, whatever is retired or trimmed later."""

    opened: dict[str, ev.GroupOpened] = field(default_factory=dict)
    siblings: dict[tuple[str, int], dict[int, Attempt]] = field(default_factory=dict)
    fates: dict[str, Fate] = field(default_factory=dict)
    frozen: dict[int, ev.BatchRecord] = field(default_factory=dict)  # the newest revision, whole
    short: dict[int, ev.BatchRecord] = field(default_factory=dict)  # groups of it were given back
    trained: set[int] = field(default_factory=set)
    step_of: dict[str, int] = field(default_factory=dict)  # group → step of its batch
    versions: dict[int, int] = field(default_factory=dict)  # version → parent
    published_step: int = 0  # the highest whose version was ever published
    retired: set[str] = field(default_factory=set)
    labels: Counter[str] = field(default_factory=Counter)
    evaluated: dict[str, ev.EvaluatedGroup] = field(default_factory=dict)

    @property
    def episodes(self) -> int:
        return self.labels.total()
