"""Sibling episodes into whole groups, from events in any order between the streams.

Owns: what is known of one group. Promise: only the newest attempt of a sibling is kept; once a
group is pinned to a batch (or closed) no event changes what was chosen; what does not count is
refused by name, for counting. Does not cover: whether a whole group may be trained on
(admission.py), order and fences of streams (machine.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from muster.types import EpisodeKey, Fate, OutcomeLabel, Purpose
from services.readybank.events import (
    BankRules,
    EpisodeRecorded,
    GroupOpened,
    LabelRecorded,
    LeasedGroup,
    LeasedSibling,
    TurnIntended,
    TurnRecorded,
)

OLDER, DUPLICATE, CLOSED, NO_SIBLING = "older_attempt", "duplicate", "closed", "no_such_sibling"

EpisodeEvent = TurnIntended | TurnRecorded | EpisodeRecorded | LabelRecorded


@dataclass
class Attempt:
    """One attempt at one sibling, as far as it is known."""

    number: int
    turns: dict[int, TurnRecorded] = field(default_factory=dict)
    turns_total: int | None = None  # known with its end
    label: OutcomeLabel | None = None
    intended: int = -1  # newest turn whose command was about to run
    at_unix_s: float = 0.0  # of the last event that counted

    def missing(self, repairs_max: int) -> str:
        """What this attempt still lacks, empty when it is over for good."""
        if self.label is None:
            return "its end"
        if not self.label.outcome.valid:
            # Nothing of an invalid attempt is trained on, so only its end matters.
            return "" if self.number >= repairs_max else "its repair"
        if self.turns_total is None:
            return "its end"
        absent = [t for t in range(self.turns_total) if t not in self.turns]
        return f"turn {absent[0]}" if absent else ""


class GroupAssembly:
    """One group. `closed` groups have a fate and hold no data; `fate` tells which.

    A closed group still takes its opening, so that it is known of which job it was.
    """

    def __init__(self, group: str):
        self.group = group
        self.opened: GroupOpened | None = None
        self.siblings: dict[int, Attempt] = {}
        self.pinned: tuple[int, ...] | None = None
        self.closed = False
        self.fate: Fate | None = None  # one that needs no batch
        self.told = False  # its fate is durable
        self.reason = ""  # why it was filtered, while this bank knows

    def rules(self, rules: BankRules) -> BankRules:
        """The bank's, with what the group's job wants instead."""
        policy = self.opened.policy if self.opened else None
        if policy is None:
            return rules
        pick = (
            ("repairs_max", policy.repairs_max),
            ("valid_min", policy.valid_min),
            ("zero_variance", policy.zero_variance),
        )
        wanted = {name: value for name, value in pick if value is not None}
        return replace(rules, **wanted) if wanted else rules

    def open(self, event: GroupOpened) -> str:
        """Empty, or why the event was refused."""
        if self.opened is not None:
            return CLOSED if self.closed else DUPLICATE
        self.opened = event
        return CLOSED if self.closed else ""

    def take(self, event: EpisodeEvent) -> str:
        """Keep what the event says of its attempt; empty, or why it was refused."""
        refused = self._refusal(event.episode)
        if refused:
            return refused
        key = event.episode
        known = self.siblings.get(key.sibling)
        if known is None or key.attempt > known.number:
            known = self.siblings[key.sibling] = Attempt(key.attempt)
        if not _keep(known, event):
            return DUPLICATE
        known.at_unix_s = max(known.at_unix_s, event.at_unix_s)
        return ""

    def _refusal(self, key: EpisodeKey) -> str:
        if self.closed:
            return CLOSED
        size = self.opened.group_size if self.opened else None
        if key.sibling < 0 or key.attempt < 0 or (size is not None and key.sibling >= size):
            return NO_SIBLING
        if self.pinned is not None:
            if key.sibling >= len(self.pinned):
                return NO_SIBLING
            chosen = self.pinned[key.sibling]
            return OLDER if key.attempt < chosen else CLOSED if key.attempt > chosen else ""
        known = self.siblings.get(key.sibling)
        return OLDER if known is not None and key.attempt < known.number else ""

    def pin(self, attempts: tuple[int, ...]) -> None:
        """These attempts are in a batch: no other ever counts, nor did."""
        self.pinned = attempts
        for sibling, attempt in [*self.siblings.items()]:
            if sibling >= len(attempts) or attempt.number != attempts[sibling]:
                del self.siblings[sibling]

    def close(self, fate: Fate) -> None:
        """Filtered or evaluated, and in no batch any more: nothing of the group is needed."""
        self.closed, self.fate, self.pinned = True, fate, None
        self.siblings.clear()

    @property
    def filtered(self) -> bool:
        return self.fate is Fate.FILTERED

    @property
    def evaluates(self) -> bool:
        """It is of an evaluation: no trainer ever gets it."""
        return self.opened is not None and self.opened.purpose is Purpose.EVALUATE

    def missing(self, repairs_max: int) -> str:
        """What the group waits for, for people; empty when it is complete."""
        if self.opened is None:
            return "its opening"
        for number in range(self.opened.group_size):
            attempt = self.siblings.get(number)
            if attempt is None:
                return f"sibling {number}"
            lacks = attempt.missing(repairs_max)
            if lacks:
                return f"sibling {number} attempt {attempt.number}: {lacks}"
        return ""

    def members(self) -> list[Attempt]:
        """The counting attempts in sibling order; only for a complete group."""
        assert self.opened is not None
        return [self.siblings[number] for number in range(self.opened.group_size)]

    @property
    def complete_unix_s(self) -> float:
        """When the last event that counts became durable; the same in every order of arrival."""
        assert self.opened is not None
        return max(self.opened.at_unix_s, *(m.at_unix_s for m in self.members()))

    @property
    def dropped(self) -> bool:
        """Closed for good: its fate is durable, and no batch has it all the same."""
        return self.closed and self.told and self.pinned is None

    @property
    def opened_unix_s(self) -> float:
        """When its opening became durable, 0 while that is not known."""
        return self.opened.at_unix_s if self.opened else 0.0

    def leased(self) -> LeasedGroup:
        """The group as a trainer gets it; only for a complete group."""
        assert self.opened is not None
        opened = self.opened
        siblings = tuple(_leased(n, attempt) for n, attempt in enumerate(self.members()))
        return LeasedGroup(self.group, opened.task, opened.sampling, siblings)


def _keep(attempt: Attempt, event: EpisodeEvent) -> bool:
    """False when it was known already; the first record of a thing stands."""
    if isinstance(event, TurnIntended):
        fresh = event.turn > attempt.intended
        attempt.intended = max(attempt.intended, event.turn)
        return fresh
    if isinstance(event, TurnRecorded):
        return attempt.turns.setdefault(event.turn, event) is event
    if isinstance(event, EpisodeRecorded):
        fresh = attempt.turns_total is None
        attempt.turns_total = event.turns if fresh else attempt.turns_total
        return fresh
    fresh = attempt.label is None
    attempt.label = event.label if fresh else attempt.label
    return fresh


def _leased(number: int, attempt: Attempt) -> LeasedSibling:
    assert attempt.label is not None
    keys: tuple[str, ...] = ()
    if attempt.label.outcome.valid:
        keys = tuple(attempt.turns[t].payload_key for t in range(attempt.turns_total or 0))
    return LeasedSibling(number, attempt.number, attempt.label, keys)
