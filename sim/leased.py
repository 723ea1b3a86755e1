"""What a trainer got, held against what truly happened.

Owns: the checks of leased batches (DESIGN §5: 2, 3, 4, 5, 6, 7). Promise: the tokens are compared
with what the replicas remember to have sampled for that very context. Does not cover: records in
the streams (checks.py).
"""

from __future__ import annotations

from muster.leased import TrainBatch, Trajectory
from muster.types import Segment, SegmentKind
from services.readybank import events as e
from services.trainer.lineage import trajectory_lag
from sim.checks import Checks
from sim.engine import Engines
from sim.work import fingerprint


class LeaseChecks:
    """Hears of every batch that reached the trainer."""

    def __init__(self, checks: Checks, engines: Engines):
        self.checks, self.engines = checks, engines
        self.lag_max = 0
        self._sent: dict[tuple[int, int], bytes] = {}  # by step and revision
        engines.stale = lambda problem: self._problem(f"8: {problem}")
        engines.on_disk = checks.trainer.has
        checks.trainer.on_lease = self._on_lease

    def power_cut(self) -> None:
        """What was sent and is in no checkpoint may be composed anew."""
        self._sent.clear()

    def _problem(self, text: str) -> None:
        self.checks.problems.append(text)

    def _on_lease(self, sent: e.SendBatch, batch: TrainBatch) -> None:
        frozen = self.checks.facts.frozen.get(batch.step)
        members = [(m.group, tuple(m.attempts)) for m in batch.frozen.members]
        if frozen is None or members != [(m.group, tuple(m.attempts)) for m in frozen.members]:
            self._problem(f"2: step {batch.step} was sent before it was durable, or otherwise")
        digest = fingerprint(tuple(hash(t) for t in batch.trajectories))
        if self._sent.setdefault((batch.step, batch.frozen.revision), digest) != digest:
            self._problem(f"2: step {batch.step} was sent twice and not the same")
        for trajectory in batch.trajectories:
            self._trajectory(batch.step, trajectory)

    def _trajectory(self, step: int, trajectory: Trajectory) -> None:
        known = self.checks.facts.siblings.get((trajectory.group, trajectory.sibling), {})
        where = f"{trajectory.id} in step {step}"
        if trajectory.attempt != max(known, default=-1):
            self._problem(f"3: {where} is not the newest attempt")
            return
        attempt = known[trajectory.attempt]
        if attempt.label != trajectory.label:
            self._problem(f"4: {where} has another label than it was given")
        if not trajectory.label.outcome.valid:
            if trajectory.segments:
                self._problem(f"4: {where} is invalid and has tokens")
            return
        replies = [s for s in trajectory.segments if s.kind is SegmentKind.MODEL]
        sampled = sum(turn.sampled_tokens > 0 for turn in attempt.turns.values())
        if len(replies) != sampled:
            self._problem(f"1: {where} has {len(replies)} replies of {sampled}")
        self._tokens(where, step, trajectory.segments)
        self._lag(where, trajectory)

    def _lag(self, where: str, trajectory: Trajectory) -> None:
        """As the trainer reckons it: of the first sampled token."""
        lineage = self.checks.trainer.lineage
        said = trajectory_lag(lineage, trajectory)
        first = next((s for s in trajectory.segments if s.kind is SegmentKind.MODEL), None)
        truth = lineage.lag(first.spans[0].version) if first is not None else None
        if said != truth:
            self._problem(f"5: {where} has a lag of {truth}, and the trainer says {said}")

    def _tokens(self, where: str, step: int, segments: tuple[Segment, ...]) -> None:
        context: tuple[int, ...] = ()
        for segment in segments:
            if segment.kind is SegmentKind.PROMPT:
                context = ()
            elif segment.kind is SegmentKind.MODEL:
                known = self.engines.sampled.get((fingerprint(context), segment.token_ids), [])
                if segment not in known:
                    self._problem(f"6: {where}: tokens, versions or logprobs were never sampled")
                for span in segment.spans:
                    if not self.checks.of_record(span.version):
                        self._problem(f"5: {where}: version {span.version} is of no record")
                    if span.kv_min_version > span.version:
                        self._problem(f"7: {where}: the oldest version is newer than the version")
                    self.lag_max = max(self.lag_max, step - 1 - span.kv_min_version)
            context += segment.token_ids
