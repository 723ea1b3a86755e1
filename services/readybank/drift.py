"""Is a complete group too far from the newest policy to be trained on?

Owns: that decision, and what is to be scored for it. Promise: pure; a group that is refused was
bounded above `kl_refuse` or measured above `kl_sure`; a group waits for a score `score_wait_s` at
most, `scores_max` times at most; one ScoreGroup is under way at most. Less drift is no reason to go
first: what is admitted is ordered by age (batch.py), and nothing is weighted here. Does not cover:
the bound (ledger.py), the calls (adapters/scoring.py), the trainer's own word (returning.py).

A group is judged by its worst trajectory, of the valid ones, when it is complete and again with
each version:

- the bound is at most `kl_sure`: admitted;
- it is above `kl_refuse`: filtered, `stale_kl`. About `calibrate_share` of these (by a hash of the
  group's name) are scored all the same before, so that what the bound is worth is known also where
  it decides. What the score says changes nothing;
- between, or with a step that was not measured: the worst `score_siblings` of the trajectories in
  question are scored. One above `kl_sure`: filtered, `stale_kl_scored`; none: admitted. As the
  bound is too high by about the lag where steps are unlike, `kl_refuse` is `kl_sure` times the lag;
- nobody scored it in time (no replica is idle, it was sampled with a temperature or a cut that an
  engine does not score, it was scored `scores_max` times): admitted. Refusing would filter by how
  busy the fleet is, and the trainer, whose recompute is the truth, may still give it back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from zlib import crc32

from muster.types import SamplingParams, Value
from services.readybank.assembly import Attempt, GroupAssembly
from services.readybank.events import BankRules, GroupScored, Score, ScoreGroup, ToScore
from services.readybank.ledger import Drift, Ledger, Run
from services.readybank.lineage import Lineage

STALE, STALE_SCORED = "stale_kl", "stale_kl_scored"
_SHARES = 1_000_000


class Decision(StrEnum):
    """What becomes of a group."""

    FINE = "fine"
    WAIT = "wait"  # for a score
    REFUSE = "refuse"


class Judgement(Value, frozen=True):
    """The decision, why, and the figures of the group's worst trajectory."""

    decision: Decision
    reason: str = ""
    predicted_kl: float | None = None
    scored_kl: float | None = None


FINE = Judgement(Decision.FINE)


@dataclass
class _Doubt:
    """What was asked and heard of one group."""

    since: float = math.inf  # when it began to wait for the score that it waits for
    scores: dict[int, Score] = field(default_factory=dict)  # by sibling, the newest
    scored_at: int = -1  # newest version when it was scored
    tries: int = 0
    given_up: bool = False  # nobody scored it
    refused: bool = False  # for its bound: a score changes nothing


class Drifts:
    """Of every group that is complete and not over."""

    def __init__(self, rules: BankRules, lineage: Lineage, ledger: Ledger):
        self._rules, self._lineage, self._ledger = rules, lineage, ledger
        self._doubts: dict[str, _Doubt] = {}
        self._waiting: dict[str, tuple[ToScore, ...]] = {}  # groups to be scored, oldest first
        self._under_way = ""

    def judge(self, known: GroupAssembly, now: float) -> Judgement:
        """Of a complete group that is admissible in all else. `now`: seconds, steady."""
        found = self._judge(known, now) if self._rules.kl_refuse else FINE
        if found.decision is not Decision.WAIT:
            self._waiting.pop(known.group, None)
        return found

    def _judge(self, known: GroupAssembly, now: float) -> Judgement:
        rules, doubt = self._rules, self._doubts.get(known.group, _Doubt())
        found = [(n, a, self._drift(known.group, n, a)) for n, a in _valid(known)]
        doubtful = [(n, a, d) for n, a, d in found if d.missing or d.kl > rules.kl_sure]
        if not doubtful and not doubt.refused:
            return FINE
        self._doubts[known.group] = doubt
        doubtful.sort(key=lambda one: (-one[2].kl, one[0]))
        if doubt.refused or doubtful[0][2].kl > rules.kl_refuse:
            return self._refuse(known, doubt, now)
        if doubt.scored_at == self._lineage.newest:
            above = any(s.kl > rules.kl_sure for s in self._newest_scores(doubt))
            return self._stale(known, doubt, STALE_SCORED) if above else FINE
        if not self._waits(known, doubt, [(n, a) for n, a, _ in doubtful], now):
            return FINE
        sibling, _, worst = doubtful[0]
        told = f"sibling {sibling} is {_told(worst)} from the newest policy: to be scored"
        return Judgement(Decision.WAIT, told)

    def _refuse(self, known: GroupAssembly, doubt: _Doubt, now: float) -> Judgement:
        """For its bound; those chosen for calibration are scored first."""
        doubt.refused = True
        if not doubt.scores and calibrates(known.group, self._rules.calibrate_share):
            worst = [(n, a) for n, a, _ in self._bounds(known)]
            if self._waits(known, doubt, worst, now):
                return Judgement(Decision.WAIT, "refused for its drift, to be scored all the same")
        return self._stale(known, doubt, STALE)

    def _waits(
        self, known: GroupAssembly, doubt: _Doubt, asked: list[tuple[int, Attempt]], now: float
    ) -> bool:
        """Put it among those to be scored, unless that is over."""
        opened, rules = known.opened, self._rules
        assert opened is not None
        late = now - doubt.since >= rules.score_wait_s
        if doubt.given_up or late or doubt.tries >= rules.scores_max:
            return False
        if not scorable(opened.sampling):
            return False
        doubt.since = min(doubt.since, now)
        self._waiting[known.group] = tuple(
            ToScore(n, a.number, keys_of(a)) for n, a in asked[: rules.score_siblings]
        )
        return True

    def next(self) -> ScoreGroup | None:
        """What to score now, if anything."""
        if self._under_way or not self._waiting:
            return None
        group, siblings = next(iter(self._waiting.items()))
        self._under_way = group
        self._doubts[group].tries += 1
        return ScoreGroup(group, self._lineage.newest, siblings, self._rules.score_tokens)

    def scored(self, event: GroupScored) -> None:
        """The group is to be judged again."""
        self._over(event.group)
        doubt = self._doubts.get(event.group)
        if doubt is None:
            return
        doubt.since, doubt.scored_at = math.inf, max((s.version for s in event.scores), default=-1)
        doubt.scores.update({score.sibling: score for score in event.scores})

    def missed(self, group: str) -> None:
        """Nobody scored it; the same."""
        self._over(group)
        if group in self._doubts:
            self._doubts[group].given_up = True

    def _over(self, group: str) -> None:
        self._under_way = "" if self._under_way == group else self._under_way

    def waits(self, group: str) -> bool:
        """It is to be scored, or is being scored."""
        return group in self._waiting

    def leave(self, group: str) -> None:
        """It waits for nothing any more; what is known of it is kept for its lease."""
        self._waiting.pop(group, None)

    def forget(self, group: str) -> None:
        """It is over."""
        self._waiting.pop(group, None)
        self._doubts.pop(group, None)

    def figures(
        self, group: str, sibling: int, attempt: Attempt
    ) -> tuple[float | None, float | None]:
        """Bound and score of a trajectory, for whoever leases it."""
        score = self._score(group, sibling, attempt)
        return self._ledger.drift(runs_of(attempt)).bound, score.kl if score else None

    def _drift(self, group: str, sibling: int, attempt: Attempt) -> Drift:
        """The lower of two bounds: of the ledger, and of a score taken on from its version."""
        bound = self._ledger.drift(runs_of(attempt))
        score = self._score(group, sibling, attempt)
        if score is None:
            return bound
        onward = self._ledger.onward(score.version, score.kl)
        return onward if bound.missing > onward.missing or onward.kl < bound.kl else bound

    def _score(self, group: str, sibling: int, attempt: Attempt) -> Score | None:
        doubt = self._doubts.get(group)
        found = doubt.scores.get(sibling) if doubt else None
        return found if found and found.attempt == attempt.number else None

    def _newest_scores(self, doubt: _Doubt) -> list[Score]:
        return [s for s in doubt.scores.values() if s.version == self._lineage.newest]

    def _bounds(self, known: GroupAssembly) -> list[tuple[int, Attempt, Drift]]:
        """Every valid trajectory by its bound alone, the worst first."""
        found = [(n, a, self._ledger.drift(runs_of(a))) for n, a in _valid(known)]
        return sorted(found, key=lambda one: (-one[2].kl, one[0]))

    def _stale(self, known: GroupAssembly, doubt: _Doubt, reason: str) -> Judgement:
        """With the bound of the same tokens that the worst score is of, where there is a score."""
        scores = self._newest_scores(doubt)
        if not scores:
            return Judgement(Decision.REFUSE, reason, self._bounds(known)[0][2].kl)
        worst = max(scores, key=lambda s: (s.kl, -s.sibling))
        bound = self._ledger.drift(runs_of(known.siblings[worst.sibling]), worst.tokens)
        return Judgement(Decision.REFUSE, reason, bound.bound, worst.kl)


def calibrates(group: str, share: float) -> bool:
    """True for about that share of all names; the same name, the same answer."""
    return crc32(group.encode()) % _SHARES < share * _SHARES


def scorable(sampling: SamplingParams) -> bool:
    """An engine scores given tokens under the distribution that they were sampled from."""
    return sampling.temperature == 1.0 and sampling.top_p == 1.0 and sampling.top_k == 0


def runs_of(attempt: Attempt) -> list[Run]:
    """Its sampled tokens in order, by the oldest version that they attended to."""
    turns = (attempt.turns[number] for number in sorted(attempt.turns))
    return [(s.kv_min_version, s.end - s.start) for turn in turns for s in turn.spans]


def keys_of(attempt: Attempt) -> tuple[str, ...]:
    """Payload keys of its turns, in order."""
    return tuple(attempt.turns[t].payload_key for t in range(attempt.turns_total or 0))


def _valid(known: GroupAssembly) -> list[tuple[int, Attempt]]:
    found = enumerate(known.members())
    return [(n, a) for n, a in found if a.label is not None and a.label.outcome.valid]


def _told(drift: Drift) -> str:
    more = f", {drift.missing} steps not measured" if drift.missing else ""
    return f"at most {drift.kl:.3g} nats per token{more}"
