"""A run as the streams would have recorded it, played from known parameters.

Episodes run on one modelled engine, so that their prefills and decodes delay each other as in a
real run; what is recorded of them are the intervals that a router would have written.
"""

from __future__ import annotations

from functools import partial

from muster.entries import Batch, Finish, Job, Labelled, Member, Opened, RunRecord, Turn
from muster.types import EpisodeKey, EpisodeState, Outcome, OutcomeLabel, StateInterval
from sim.rollout.chain import Chain
from sim.rollout.costs import EngineCosts
from sim.rollout.engine import Done, EngineModel
from sim.rollout.heap import Alarm, Heap
from sim.rollout.workload import Plan, Regime, Workload

BEGIN_S = 1_000.0  # wall time of the first launch


class _Episode:
    def __init__(self, key: EpisodeKey, plan: Plan, chain: Chain):
        self.key, self.plan, self.chain = key, plan, chain
        self.turn = 0
        self.intervals: list[StateInterval] = []


class Played:
    """`regime.groups` groups, all launched at once, each in a cold box."""

    def __init__(self, regime: Regime, costs: EngineCosts, seed: int = 1):
        self._regime, self._heap = regime, Heap(seed)
        self._engine = EngineModel(kv_tokens=regime.kv_tokens, costs=costs)
        self._alarm = Alarm(self._heap, self._advance)
        self._asked: dict[str, _Episode] = {}
        self._entries = 0
        self.turns: list[Turn] = []
        self.finished: list[Finish] = []
        self.labels: list[Labelled] = []
        self.opened: list[Opened] = []
        self._workload = Workload(regime, seed)

    def record(self) -> RunRecord:
        """All of it, with one batch of all groups."""
        for group in range(self._regime.groups):
            self._open(group)
        self._heap.run()
        size = self._regime.group_size
        members = tuple(Member(o.key.group, (0,) * size) for o in self.opened)
        end = BEGIN_S + self._heap.now
        batches = [
            Batch(self._at(), step, False, members, asked, end, 1, 0)
            for step, asked in ((1, BEGIN_S), (2, end - 50.0))
        ]
        job = Job(self._at(), "job", len(members), size, BEGIN_S, cancelled=False)
        return RunRecord(
            "played",
            opened=tuple(self.opened),
            turns=tuple(self.turns),
            finished=tuple(self.finished),
            labels=tuple(self.labels),
            batches=tuple(batches),
            jobs=(job,),
        )

    def _open(self, group: int) -> None:
        name = f"job-{group:05d}"
        key = EpisodeKey("played", name, 0, 0, 1)
        size = self._regime.group_size
        self.opened.append(Opened(self._at(), key, "job", "task", size, 0, BEGIN_S))
        for sibling in range(size):
            plan = self._workload.plan(group, sibling, 0)
            runs = (("system", self._regime.system_tokens), (name, self._regime.group_tokens))
            episode = _Episode(EpisodeKey("played", name, sibling, 0, 1), plan, Chain.shared(*runs))
            self._spent(episode, EpisodeState.BOX_START, 0.0, plan.box_start_s)
            self._heap.at(plan.box_start_s, partial(self._ask, episode))

    def _ask(self, episode: _Episode) -> None:
        self._asked[episode.key.id] = episode
        sampled = episode.plan.turns[episode.turn].sampled_tokens
        self._engine.submit(episode.key.id, episode.chain, sampled, self._heap.now)
        self._alarm.set(self._engine.next_at())

    def _advance(self) -> None:
        for done in self._engine.advance(self._heap.now):
            self._replied(self._asked.pop(done.id), done)
        self._alarm.set(self._engine.next_at())

    def _replied(self, episode: _Episode, done: Done) -> None:
        turn, prompt = episode.plan.turns[episode.turn], episode.chain.tokens
        filled, queued = done.at - done.decode_s, done.at - done.decode_s - done.prefill_s
        self._spent(episode, EpisodeState.QUEUE, queued - done.queue_s, queued)
        self._spent(episode, EpisodeState.PREFILL, queued, filled)
        self._spent(episode, EpisodeState.DECODE, filled, done.at)
        end = done.at + turn.tool_s
        self._spent(episode, EpisodeState.TOOL, done.at, end)
        self.turns.append(
            Turn(
                at=self._at(),
                key=episode.key,
                seq=episode.turn,
                turn=episode.turn,
                prompt_tokens=prompt,
                sampled_tokens=turn.sampled_tokens,
                cached_tokens=done.cached_tokens,
                spans=(),
                replica="replica-0",
                intervals=tuple(episode.intervals),
            )
        )
        episode.intervals = []
        episode.chain.extend(turn.sampled_tokens + turn.observation_tokens)
        episode.turn += 1
        on = episode.turn < len(episode.plan.turns)
        self._heap.at(end, partial(self._ask if on else self._end, episode))

    def _end(self, episode: _Episode) -> None:
        now, plan = self._heap.now, episode.plan
        self._spent(episode, EpisodeState.VERIFY, now, now + plan.verify_s)
        end = BEGIN_S + now + plan.verify_s
        self.finished.append(
            Finish(
                at=self._at(),
                key=episode.key,
                seq=episode.turn,
                turns=episode.turn,
                host="host-0",
                intervals=tuple(episode.intervals),
                started_unix_s=BEGIN_S,
                finished_unix_s=end,
            )
        )
        outcome = Outcome.MODEL_SUCCESS if plan.reward else Outcome.MODEL_FAILURE
        label = OutcomeLabel(outcome, "verified", reward=plan.reward)
        self.labels.append(Labelled(self._at(), episode.key, label))

    def _spent(self, episode: _Episode, state: EpisodeState, start: float, end: float) -> None:
        episode.intervals.append(StateInterval(state, BEGIN_S + start, BEGIN_S + end))

    def _at(self) -> str:
        self._entries += 1
        return f"{self._entries}-0"
