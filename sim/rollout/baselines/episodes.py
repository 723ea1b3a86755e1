"""The loop that every baseline has in common: one attempt from its box to its verdict.

Owns: turns on the modelled engines, tool times, boxes, failures, what the recorder is told.
Promise: the same for all baselines; what differs are the hooks of `Loop`. Does not cover: who is
launched, placed, held or trained (barrier.py, asynchronous.py, holding.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

from muster.errors import Refused
from sim.rollout.baselines.fleet import Engines
from sim.rollout.bound import peak_rate
from sim.rollout.boxes import Boxes, Ticket
from sim.rollout.chain import Chain
from sim.rollout.costs import EngineCosts
from sim.rollout.doing import Doing
from sim.rollout.engine import Done, EngineModel
from sim.rollout.figures import Fleet, RunFigures, figures
from sim.rollout.heap import Entry, Heap
from sim.rollout.measure import Recorder
from sim.rollout.workload import Plan, Regime, Workload

SAMPLE_S = 10.0  # between two looks at the rates of the engines


class Group:
    """One task and its siblings."""

    __slots__ = ("done", "id", "order", "siblings")

    def __init__(self, number: int):
        self.id, self.done, self.order = number, 0, 0
        self.siblings: list[Episode] = []


class Episode:
    """One sibling; its attempts follow each other. `home`: the replica it belongs to, or -1."""

    __slots__ = (
        *("asked_at", "attempt", "chain", "context", "death", "group", "home", "id", "over"),
        *("held", "plan", "sibling", "ticket", "turn", "wake", "where"),
    )

    def __init__(self, group: Group, sibling: int):
        self.group, self.sibling, self.attempt = group, sibling, -1
        self.id = ""
        self.plan: Plan
        self.chain: Chain
        self.ticket: Ticket
        self.turn, self.asked_at = 0, 0.0
        self.context = 0  # tokens while it needs a replica, else 0
        self.home = self.where = -1  # replica it belongs to; replica that answers it now
        self.held = 0  # a number of its own while it is held back, else 0
        self.death: Entry | None = None  # of its box
        self.wake: Entry | None = None  # end of its tool or verifier
        self.over = True  # nothing of it runs


class Loop(ABC):
    """A baseline: subclass it and decide. `batches` cuts, then what is open is followed to its end
    (`follow`), so that the bias can be told."""

    name = ""
    spares = 0  # boxes kept warm

    def __init__(
        self,
        regime: Regime,
        seed: int,
        batches: int,
        *,
        follow: bool = True,
        costs: EngineCosts | None = None,
        trace: bool = False,
    ):
        self.regime, self.seed, self.target, self.follow = regime, seed, batches, follow
        self.costs = costs or EngineCosts()
        self.heap = Heap(seed, trace=trace)
        self.workload = Workload(regime, seed)
        self.engines = Engines(self.heap, self.models(), self.answered)
        self.boxes = Boxes(self.heap, regime, spares=self.spares, freed=self.box_freed)
        self.recorder = Recorder(
            group_size=regime.group_size,
            replicas=regime.replicas,
            peak_rate=peak_rate(regime, self.costs),
        )
        self.groups_opened = 0
        self.fleets: list[Fleet] = []
        self.live: dict[str, Episode] = {}

    def models(self) -> list[EngineModel]:
        """The engines of the fleet."""
        kv, costs = self.regime.kv_tokens, self.costs
        return [EngineModel(kv_tokens=kv, costs=costs) for _ in range(self.regime.replicas)]

    def run(self) -> RunFigures:
        """Run to the end and say how it went."""
        self.begin()
        self.heap.after(0.0, self._sample)
        if not self.heap.run(lambda: self.over):
            raise Refused(
                "the baseline came to a stop before its last batch",
                field="batches",
                value=len(self.recorder.batches),
                way_out="give it a fleet on which an episode can end: boxes, KV above the limit",
            )
        return figures(
            self.recorder, self.fleets, arm=self.name, regime=self.regime.name, seed=self.seed
        )

    @property
    def enough(self) -> bool:
        """All batches are cut: nothing new is opened."""
        return len(self.recorder.batches) >= self.target

    @property
    def over(self) -> bool:
        """Nothing is left to be told."""
        return self.enough and not (self.follow and self.live)

    # What a baseline decides.

    @abstractmethod
    def begin(self) -> None:
        """Start the first groups."""

    @abstractmethod
    def place(self, episode: Episode) -> int:
        """The replica for the next turn; `episode.home` is the last one, or -1."""

    def ready(self, episode: Episode) -> None:
        """The box is up, or a tool returned: by default the next turn begins."""
        self.generate(episode)

    def settled(self, episode: Episode) -> None:
        """A turn was answered, or the episode left its replica: by default nothing to decide."""
        return

    def grown(self, episode: Episode, tokens: int) -> None:
        """The context of an episode that needs a replica changed by so many tokens."""
        episode.context += tokens

    def box_freed(self) -> None:
        """A box is available: by default nobody was waiting for that."""
        return

    @abstractmethod
    def complete(self, group: Group) -> None:
        """All siblings have their verdict."""

    def hurt(self, episode: Episode) -> None:
        """The infrastructure took an attempt: by default its whole group runs again."""
        group = episode.group
        group.done = 0
        for other in group.siblings:
            self.stop(other)
        for other in group.siblings:
            self.launch(other)

    # The loop.

    def open_group(self) -> Group:
        """The next task of the task set, nothing of it launched."""
        group = Group(self.groups_opened)
        group.siblings = [Episode(group, s) for s in range(self.regime.group_size)]
        self.groups_opened += 1
        return group

    def launch(self, episode: Episode) -> None:
        """The next attempt of a sibling."""
        episode.attempt += 1
        group, sibling = episode.group.id, episode.sibling
        plan = episode.plan = self.workload.plan(group, sibling, episode.attempt)
        regime, now = self.regime, self.heap.now
        shared = (("system", regime.system_tokens), (f"group-{group}", regime.group_tokens))
        episode.chain = Chain.shared(*shared)
        episode.id = f"{group}.{sibling}.{episode.attempt}"
        episode.turn, episode.held, episode.over = 0, 0, False
        self.live[episode.id] = episode
        self.recorder.launched(group, sibling, episode.attempt, plan.alone_s, now)
        self.grown(episode, episode.chain.tokens)
        episode.ticket = self.boxes.acquire(
            plan.box_start_s,
            partial(self._tell, episode, Doing.BOX_START),
            partial(self._box_up, episode),
        )

    def generate(self, episode: Episode) -> None:
        """Send the next turn."""
        replica = self.place(episode)
        self.sit(episode, replica)
        episode.where, episode.asked_at = replica, self.heap.now
        turn = episode.plan.turns[episode.turn]
        self._tell(episode, Doing.QUEUE)
        self.engines.submit(replica, episode.id, episode.chain, turn.sampled_tokens)

    def sit(self, episode: Episode, replica: int) -> None:
        """Make a replica the episode's home (-1: none)."""
        if replica != episode.home:
            self.engines.seat(episode.home, replica)
            episode.home = replica
            if replica >= 0:
                self.recorder.seated(episode.group.id, episode.sibling, replica, self.heap.now)

    def answered(self, done: Done) -> None:
        """A turn's tokens are there: act, or be over when the context is full."""
        episode, now = self.live[done.id], self.heap.now
        self.heap.note(done.id)
        group, sibling = episode.group.id, episode.sibling
        turn = episode.plan.turns[episode.turn]
        episode.chain.extend(turn.sampled_tokens)
        self.recorder.generated(group, sibling, episode.asked_at, done.queue_s, done.prefill_s)
        episode.where = -1
        self._tell(episode, Doing.TOOL)
        self.grown(episode, turn.sampled_tokens)
        episode.wake = self.heap.at(now + turn.tool_s, partial(self._acted, episode))
        self.settled(episode)

    def stop(self, episode: Episode) -> None:
        """End whatever the present attempt is doing; nothing of it counts."""
        if episode.over:
            return
        episode.over = True
        del self.live[episode.id]
        for entry in (episode.wake, episode.death):
            if entry is not None:
                self.heap.cancel(entry)
        episode.wake = episode.death = None
        if episode.where >= 0:
            self.engines.abort(episode.where, episode.id)
            episode.where = -1
        self.boxes.release(episode.ticket)
        self.recorder.stopped(episode.group.id, episode.sibling, self.heap.now)
        self._left(episode)

    def cut(self, groups: list[Group]) -> None:
        """Hand a batch to the trainer."""
        self._sample_once()
        models, figures = self.engines.models, self.engines.figures()
        recomputed = sum(model.recomputed_tokens for model in models)
        self.recorder.engines(figures.prefilled_tokens, recomputed)
        self.recorder.cut((group.id for group in groups), self.heap.now)
        self.fleets.append(figures)

    def _left(self, episode: Episode) -> None:
        """It needs no replica any more."""
        self.grown(episode, -episode.context)
        self.sit(episode, -1)
        self.settled(episode)

    def _tell(self, episode: Episode, doing: Doing) -> None:
        self.recorder.state(episode.group.id, episode.sibling, doing, self.heap.now)

    def _box_up(self, episode: Episode) -> None:
        if episode.plan.start_fails:
            self._lost(episode)
            return
        life_s = episode.plan.box_life_s
        if life_s < 1e9:
            episode.death = self.heap.after(life_s, partial(self._lost, episode))
        self.ready(episode)

    def _acted(self, episode: Episode) -> None:
        """The tool returned: read what it says; then the next turn, the verifier, or the end."""
        plan = episode.plan
        turn = plan.turns[episode.turn]
        episode.wake = None
        episode.chain.extend(turn.observation_tokens)
        episode.turn += 1
        self.grown(episode, turn.observation_tokens)
        if episode.turn < len(plan.turns):
            self.ready(episode)
            return
        self._tell(episode, Doing.VERIFY)
        episode.wake = self.heap.after(plan.verify_s, partial(self._verified, episode))
        self._left(episode)

    def _verified(self, episode: Episode) -> None:
        if episode.death is not None:
            self.heap.cancel(episode.death)
            episode.death = None
        episode.wake, episode.over = None, True
        del self.live[episode.id]
        self.boxes.release(episode.ticket)
        group = episode.group
        self.recorder.finished(group.id, episode.sibling, self.heap.now)
        group.done += 1
        if group.done == len(group.siblings):
            self.complete(group)

    def _lost(self, episode: Episode) -> None:
        self.recorder.lost += 1
        episode.death = None
        self.stop(episode)
        self.hurt(episode)

    def _sample(self) -> None:
        self._sample_once()
        if self.heap.pending:  # else nothing will ever happen again
            self.heap.after(SAMPLE_S, self._sample)

    def _sample_once(self) -> None:
        for replica, model in enumerate(self.engines.models):
            self.recorder.sampled(replica, model.sampled_by(self.heap.now), self.heap.now)
