"""May a complete group be trained on?

Owns: the verdict on one group. Promise: pure, and every refusal names what and whose; a group with
a token of unknown version, of one that is not in the run's line, or that no version claims, is
never admitted (DESIGN §5.5). What is frozen already is not judged again (docs/adr/0006).
Does not cover: staleness; what becomes of invalid siblings inside an admitted group (the trainer
leaves them out of mean and gradient by their label).

Groups without contrast (all valid rewards equal) carry no gradient. By default they are trained all
the same: leaving them out would make a batch out of only the groups of middling difficulty, and
would hide how many tasks are always or never solved; they cost a slot. `zero_variance = "filter"`
trades that for fuller batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

from muster.types import Value
from services.readybank.assembly import Attempt
from services.readybank.events import BankRules, TurnRecorded
from services.readybank.lineage import Lineage, Standing


class Verdict(StrEnum):
    """What becomes of a complete group."""

    ADMIT = "admit"
    HOLD = "hold"
    FILTER = "filter"


class Admission(Value, frozen=True):
    """A verdict and why."""

    verdict: Verdict
    reason: str = ""


def admit(attempts: list[Attempt], rules: BankRules, lineage: Lineage) -> Admission:
    """Judge the counting attempts of a complete group, in sibling order."""
    valid = [(n, a) for n, a in enumerate(attempts) if a.label and a.label.outcome.valid]
    if len(valid) < rules.valid_min:
        return _filter(f"too_few_valid ({len(valid)} of {len(attempts)})")
    rewards: list[float] = []
    for number, attempt in valid:
        reward = attempt.label.reward if attempt.label else None
        if reward is None or not math.isfinite(reward):
            return _filter(f"no_reward (sibling {number})")
        rewards.append(reward)
    tokens = _tokens(valid, lineage)
    if tokens is not None:
        return tokens
    if rules.zero_variance == "filter" and len(set(rewards)) == 1:
        return _filter(f"zero_variance (all {rewards[0]:g})")
    return Admission(Verdict.ADMIT)


def _tokens(valid: Iterable[tuple[int, Attempt]], lineage: Lineage) -> Admission | None:
    awaited: Admission | None = None
    for number, attempt in valid:
        for turn in attempt.turns.values():
            where = f"sibling {number} turn {turn.turn}"
            if not covered(turn):
                return _filter(f"tokens_without_version ({where})")
            for version in sorted({v for s in turn.spans for v in (s.version, s.kv_min_version)}):
                standing = lineage.standing(version)
                if standing is Standing.FOREIGN:
                    return _filter(f"unknown_version {version} ({where})")
                if standing is Standing.ABANDONED:
                    return _filter(f"abandoned_version {version} ({where})")
                if standing is Standing.AWAITED:
                    awaited = awaited or Admission(
                        Verdict.HOLD, f"unknown_version {version} ({where})"
                    )
    return awaited


def covered(turn: TurnRecorded) -> bool:
    """True when the spans claim each sampled token of the turn exactly once, in order."""
    at = 0
    for span in turn.spans:
        if span.start != at or span.end <= span.start or span.kv_min_version > span.version:
            return False
        at = span.end
    return at == turn.sampled_tokens


def _filter(reason: str) -> Admission:
    return Admission(Verdict.FILTER, reason)
