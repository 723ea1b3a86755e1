"""The production RouterMachine, bound to the models of engines, boxes, tools and verifiers.

Owns: one attempt's conversation as the models see it, and what each command of the machine comes to
in simulated time. Promise: no rule of the router is here: every answer is an event, every next move
a command; a write is durable at once; an attempt meets the same lengths, times and reward in every
arm (its Plan). Does not cover: how long anything takes (engine.py, workload.py), boxes
(pool_actor.py), batches (bank_actor.py), faults of messages and stores (the fault world, sim/).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from muster.types import EpisodeKey, FinishReason, StepLimit, VerdictStatus, job_and_index
from services.router import events as e
from services.router.machine import RouterMachine
from sim.rollout.bank_actor import BankActor
from sim.rollout.boxes import REPLAY_DIFFERS
from sim.rollout.chain import Chain
from sim.rollout.doing import Doing
from sim.rollout.engine import Done, EngineModel
from sim.rollout.heap import Heap
from sim.rollout.measure import Recorder
from sim.rollout.pool_actor import PoolActor
from sim.rollout.talk import Talk, mark, name_of, prompt_marks
from sim.rollout.waking import Engines
from sim.rollout.workload import Workload

UNIX_S = 1.0e6
"""Wall time of the simulated second 0: the machine takes 0 for "not known"."""

TICK_S = 10.0
SAMPLE_S = 10.0  # as in the baselines
CREDIT_S = 20.0
CREDIT_TTL_S = 60.0
PROBE_S = 0.1

ACT, DONE = "```bash\nx\n```", "DONE"


class RouterActor:
    """The shell around one RouterMachine."""

    def __init__(
        self,
        machine: RouterMachine,
        heap: Heap,
        models: dict[str, EngineModel],
        pool: PoolActor,
        bank: BankActor,
        workload: Workload,
        recorder: Recorder,
    ):
        self.machine, self.heap, self.recorder = machine, heap, recorder
        self.engines = Engines(heap, models, self._done)
        self._pool, self._bank, self.workload = pool, bank, workload
        self.talks: dict[str, Talk] = {}
        self.watch: Callable[[e.RouterEvent, list[e.RouterCommand]], None] | None = None
        self.turns = self.handled = 0
        self.version = 0  # of the weights that the replicas serve
        self._inbox: deque[e.RouterEvent] = deque()
        self._busy = False
        self._requests: dict[str, e.Generate] = {}
        self._dead: set[str] = set()
        self._execute: dict[type[Any], Callable[[Any], None]] = {
            e.OpenGroup: self._open,
            e.AcquireBox: self._acquire,
            e.Generate: self._generate,
            e.AbortGenerate: self._abort,
            e.RecordIntent: self._intent,
            e.Exec: self._exec,
            e.RecordTurn: self._record,
            e.RecordRestored: self._restored,
            e.Verify: self._verify,
            e.RecordEpisode: self._finish,
            e.ReleaseBox: self._release,
            e.DropConversation: self._drop,
            e.Touch: self._touch,
            e.ProbeReplica: self._probe,
            e.TellStall: lambda command: None,
        }

    # -- the loop ----------------------------------------------------------------------

    def feed(self, event: e.RouterEvent) -> None:
        """One event, and all that follows from it at this instant, in order."""
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        inbox, handle, execute, watch = self._inbox, self.machine.handle, self._execute, self.watch
        while inbox:
            heard = inbox.popleft()
            commands = handle(heard, self.heap.now)
            self.handled += 1
            if watch is not None:
                watch(heard, commands)
            for command in commands:
                execute[type(command)](command)
        self._busy = False

    def start(self, job: e.JobSpec, hosts: tuple[str, ...]) -> None:
        """A fresh router: nothing was durable before it."""
        self.feed(e.JobSubmitted(job))
        self.feed(e.HostsListed(tuple(e.Host(h, h) for h in hosts)))
        self.feed(e.ReplicasListed(tuple(e.Replica(r, r) for r in self.engines.models)))
        self._grant()
        self._sample()
        self.feed(e.RecoveryEnded())
        self.heap.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self.feed(e.Tick())
        self.heap.after(TICK_S, self._tick)

    def _grant(self) -> None:
        self.tell()
        self.heap.after(CREDIT_S, self._grant)

    def tell(self) -> None:
        """Each replica says what its KV cache holds, and the version that it serves."""
        for name, model in self.engines.models.items():
            if name in self._dead:
                self.feed(e.ReplicaSilent(name, "no answer"))
                continue
            credit = (model.kv_tokens, CREDIT_TTL_S, model.cache.block)
            load = (model.running, model.waiting, model.steps_by(self.heap.now))
            self.feed(e.ReplicaTold(name, "life-1", self.version, True, *credit, *load))

    def kill(self, replica: str) -> None:
        """Its process is gone: what runs there fails at once, and whatever is sent there."""
        self._dead.add(replica)
        self.engines.models[replica].kill()
        for command in list(self._requests.values()):
            if command.replica == replica:
                self._failed(command)

    def _failed(self, command: e.Generate) -> None:
        if self._requests.pop(name_of(command), None) is not None:
            at = (command.episode, command.turn, command.replica)
            self.feed(e.GenerateFailed(*at, "no answer", retry=command.retry))

    def _sample(self) -> None:
        self.sample()
        self.heap.after(SAMPLE_S, self._sample)

    def sample(self) -> None:
        """Say what each engine has sampled so far."""
        for number, model in enumerate(self.engines.models.values()):
            self.recorder.sampled(number, model.sampled_by(self.heap.now), self.heap.now)

    def _probe(self, command: e.ProbeReplica) -> None:
        told = e.ReplicaProbed(command.replica, command.life, passed=True, took_s=PROBE_S)
        self.heap.after(PROBE_S, partial(self.feed, told))

    # -- records: durable at once --------------------------------------------------------

    def _open(self, command: e.OpenGroup) -> None:
        self._bank.opened(command)
        _, index = job_and_index(command.group) or ("", 0)
        regime = self.workload.regime
        marks = prompt_marks(regime, index, self.machine.rules.prefix_block_tokens)
        self.feed(e.GroupRecorded(command.group, regime.prompt_tokens, marks))

    def _intent(self, command: e.RecordIntent) -> None:
        self.feed(e.IntentRecorded(command.episode, command.turn))

    def _record(self, command: e.RecordTurn) -> None:
        self._ready(self.talks[command.episode.id])
        self.feed(e.TurnRecorded(command.episode, command.turn))

    def _restored(self, command: e.RecordRestored) -> None:
        self._ready(self.talks[command.episode.id])
        self.feed(e.RestoredRecorded(command.episode, command.repair))

    def _finish(self, command: e.RecordEpisode) -> None:
        self.feed(e.EpisodeRecorded(command.episode))
        talk = self.talks[command.episode.id]
        now = self.heap.now
        if command.label.outcome.valid:
            self.recorder.finished(talk.index, talk.number, now)
        elif command.episode.attempt < self.machine.rules.repairs_max:
            self.recorder.failed(talk.index, talk.number, now)
        else:
            self.recorder.gave_up(talk.index, talk.number, now)
        self._bank.ended(command, talk.sampled)

    # -- boxes -----------------------------------------------------------------------------

    def _acquire(self, command: e.AcquireBox) -> None:
        talk = self.talks.get(command.episode.id) or self._begin(command.episode)
        talk.starts += 1
        self.recorder.state(talk.index, talk.number, Doing.BOX_START, self.heap.now)
        self._pool.acquire(command)

    def _begin(self, key: EpisodeKey) -> Talk:
        _, index = job_and_index(key.group) or ("", 0)
        plan = self.workload.plan(index, key.sibling, key.attempt)
        regime = self.workload.regime
        shared = (("system", regime.system_tokens), (key.group, regime.group_tokens))
        talk = self.talks[key.id] = Talk(index, key.sibling, plan, Chain.shared(*shared))
        self.recorder.launched(index, key.sibling, key.attempt, plan.alone_s, self.heap.now)
        return talk

    def cold(self, command: e.AcquireBox) -> tuple[float, bool]:
        """Seconds of a start from nothing, and whether it leads to a box."""
        talk = self.talks.get(command.episode.id)
        if talk is None:
            return self.workload.regime.warm_s, True  # cancelled meanwhile: it is given back
        return talk.plan.box_start_s, self._comes_up(command.episode, talk)

    def warm(self, command: e.AcquireBox) -> tuple[float, bool]:
        """The same from a snapshot."""
        talk = self.talks.get(command.episode.id)
        up = talk is None or self._comes_up(command.episode, talk)
        return self.workload.regime.warm_s, up

    def _comes_up(self, key: EpisodeKey, talk: Talk) -> bool:
        if talk.starts == 1:
            return not talk.plan.start_fails
        chances = talk.chances(self.workload.seed, key.attempt)
        return chances.random() >= self.workload.regime.start_failure

    def has_box(self, command: e.AcquireBox, box: str, asked_at: float) -> None:
        """A host granted a box."""
        talk = self.talks.get(command.episode.id)
        now = self.heap.now
        if talk is not None:
            life_s = talk.plan.box_life_s
            if talk.starts > 1 and self.workload.regime.hazard_per_s:
                chances = talk.chances(self.workload.seed, command.episode.attempt)
                chances.random()  # it decided whether this start leads to a box
                life_s = chances.expovariate(self.workload.regime.hazard_per_s)
                talk.replays_alike = chances.random() >= REPLAY_DIFFERS
            talk.lives_until = now + life_s
            if not talk.acted:  # else its commands run again first
                self._ready(talk)
        at = (UNIX_S + asked_at, UNIX_S + now)
        self.feed(e.BoxAcquired(command.episode, command.host, box, *at))

    def _ready(self, talk: Talk) -> None:
        """It waits for the router alone from now on."""
        self.recorder.state(talk.index, talk.number, Doing.HOLD, self.heap.now)

    def no_box(self, command: e.AcquireBox, detail: str) -> None:
        """A host granted none."""
        self.feed(e.BoxRefused(command.episode, command.host, detail, retryable=True))

    def _release(self, command: e.ReleaseBox) -> None:
        self._pool.release(command.host, command.box)

    def _drop(self, command: e.DropConversation) -> None:
        self.talks.pop(command.episode.id, None)

    # -- replicas ----------------------------------------------------------------------------

    def _generate(self, command: e.Generate) -> None:
        talk = self.talks[command.episode.id]
        if command.turn >= len(talk.plan.turns):  # it read up to the limit of its context
            self.feed(e.ContextFull(command.episode, command.turn))
            return
        now, replica = self.heap.now, command.replica
        talk.reply, talk.submitted_at = talk.plan.turns[command.turn].sampled_tokens, now
        request = name_of(command)
        self._requests[request] = command
        recorder = self.recorder
        recorder.state(talk.index, talk.number, Doing.QUEUE, now)
        if replica != talk.replica:
            talk.replica = replica
            recorder.seated(talk.index, talk.number, self.engines.numbers[replica], now)
        if replica in self._dead:
            self.heap.after(PROBE_S, partial(self._failed, command))
            return
        self.engines.models[replica].submit(request, talk.chain, talk.reply, now)
        self.engines.stirred(replica)

    def _abort(self, command: e.AbortGenerate) -> None:
        request = name_of(command)
        if self._requests.pop(request, None) is not None:
            self.engines.models[command.replica].abort(request, self.heap.now)
            self.engines.stirred(command.replica)

    def _touch(self, command: e.Touch) -> None:
        talk = self.talks.get(command.episode.id)
        if talk is not None and command.replica not in self._dead:
            self.engines.models[command.replica].touch(talk.chain, self.heap.now)
            self.engines.stirred(command.replica)

    def _done(self, done: Done) -> None:
        """A reply: it is in the context, and in that replica's cache."""
        command = self._requests.pop(done.id)
        talk = self.talks[command.episode.id]
        prompt = talk.chain.tokens
        talk.chain.extend(talk.reply)
        talk.sampled += talk.reply
        self.turns += 1
        timed = (talk.submitted_at, done.queue_s, done.prefill_s)
        self.recorder.generated(talk.index, talk.number, *timed)
        last = command.turn + 1 >= len(talk.plan.turns)
        if last and talk.plan.context_full and talk.chain.tokens >= talk.plan.tokens:
            self.feed(e.ContextFull(command.episode, command.turn))
            return
        block = self.machine.rules.prefix_block_tokens
        self.feed(
            e.Generated(
                episode=command.episode,
                turn=command.turn,
                text=DONE if last and not talk.plan.context_full else ACT,
                finish=FinishReason.STOP,
                prompt_tokens=prompt,
                sampled_tokens=talk.reply,
                start_unix_s=UNIX_S + talk.submitted_at,
                queue_s=done.queue_s,
                prefill_s=done.prefill_s,
                end_unix_s=UNIX_S + done.at,
                retry=command.retry,
                cached_tokens=done.cached_tokens,
                version=self.version,
                boundary=mark(talk, command.episode, command.turn),
                boundary_tokens=talk.chain.tokens // block * block,
            )
        )

    # -- tools and verifiers -----------------------------------------------------------------

    def _exec(self, command: e.Exec) -> None:
        talk = self.talks[command.episode.id]
        now = self.heap.now
        end = now + talk.plan.turns[command.turn].tool_s
        rebuilt = command.turn < talk.acted
        doing = Doing.BOX_START if rebuilt else Doing.TOOL
        self.recorder.state(talk.index, talk.number, doing, now)
        if end <= talk.lives_until:
            self.heap.at(end, partial(self._stepped, command, now))
        else:
            self._lost(talk, self._step_lost, command)

    def _lost(self, talk: Talk, tell: Callable[[Any, e.Loss], None], command: Any) -> None:
        """The box is gone, or goes while the call is in flight."""
        loss = e.Loss.BOX_GONE if talk.lives_until <= self.heap.now else e.Loss.BOX_KILLED
        self.heap.at(talk.lives_until, partial(tell, command, loss))

    def _step_lost(self, command: e.Exec, loss: e.Loss) -> None:
        at = (command.episode, command.turn)
        self.feed(e.StepFailed(*at, "the box is gone", loss, command.box))

    def _stepped(self, command: e.Exec, begun: float) -> None:
        talk = self.talks.get(command.episode.id)
        if talk is None:
            return
        turn = talk.plan.turns[command.turn]
        if command.turn == talk.acted:  # else a lost box is rebuilt: the context has it already
            talk.acted += 1
            talk.chain.extend(turn.observation_tokens)
            output = ""
        else:
            output = "" if talk.replays_alike else "other"
        took = self.heap.now - begun
        self.feed(
            e.StepFinished(
                episode=command.episode,
                turn=command.turn,
                exit_code=0,
                limit=StepLimit.NONE,
                wall_s=took,
                cpu_s=0.0,
                output=output,
                box_broken=False,
                start_unix_s=UNIX_S + begun,
                end_unix_s=UNIX_S + self.heap.now,
                box=command.box,
                output_tokens=turn.observation_tokens,
            )
        )

    def _verify(self, command: e.Verify) -> None:
        talk = self.talks[command.episode.id]
        now = self.heap.now
        end = now + talk.plan.verify_s
        self.recorder.state(talk.index, talk.number, Doing.VERIFY, now)
        if end <= talk.lives_until:
            self.heap.at(end, partial(self._judged, command, now))
        else:
            self._lost(talk, self._verify_lost, command)

    def _verify_lost(self, command: e.Verify, loss: e.Loss) -> None:
        self.feed(e.VerifyFailed(command.episode, "the box is gone", loss))

    def _judged(self, command: e.Verify, begun: float) -> None:
        talk = self.talks.get(command.episode.id)
        if talk is None:
            return
        at = (UNIX_S + begun, UNIX_S + self.heap.now)
        rewarded = VerdictStatus.REWARDED
        self.feed(e.VerdictGiven(command.episode, rewarded, talk.plan.reward, "", *at))
