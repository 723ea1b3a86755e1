"""The real RouterMachine and the real Durable adapter in the world, as one of two processes.

Owns: the shell around them, as services/router/driver.py has it. Promise: what a former
incarnation has under way is refused by epoch, never by this file. Does not cover: the calls to
replicas and hosts (calls.py).
"""

from __future__ import annotations

import functools
from typing import Any

from msgspec.structs import replace

from muster.errors import MusterError
from muster.types import EpisodeKey, Purpose, SamplingParams, job_and_index
from services.router import chat
from services.router import events as e
from services.router.adapters.durable import TAILED, Durable, task_info
from services.router.adapters.restore import TurnUsage
from services.router.conversation import Conversation
from services.router.machine import RouterMachine
from services.router.rules import RouterRules
from sim.calls import Calls
from sim.client import ModelRedis
from sim.engine import Engines
from sim.led import Led, Shared
from sim.models import Model
from sim.streams import RUN, ModelStreams, at_once
from sim.watch import Watch
from sim.work import CODEC, EVALUATION, JOB, blocks, tasks

_POLL_S = 0.5
BLOCK = 16  # tokens per entry of the router's index


class Router(Led):
    """One process; `machine` is there while it leads."""

    def __init__(
        self,
        shared: Shared,
        name: str,
        model: Model,
        machine: type[RouterMachine],
        calls: type[Calls] = Calls,
        engines: Engines | None = None,
    ):
        super().__init__(shared, name, "router")
        self.engines = engines or Engines()
        self.model, self._make, self._calls = model, machine, calls
        self.machine: RouterMachine | None = None
        self.acked: set[str] = set()  # ends of episodes that it was told are durable
        self._claimed: set[tuple[str, int]] = set()  # (name, life)
        self._listed: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def died(self) -> None:
        self.machine = None
        self.epoch = 0

    def lead(self) -> None:
        model = self.model
        rules = RouterRules(
            RUN,
            self.epoch,
            groups_per_batch=model.groups_per_batch,
            repairs_max=model.repairs_max,
            lag_max=model.lag_max,
            turns_max=1 if model.fast_s else model.turns_max,
            episode_timeout_s=300.0 if model.fast_s else model.episode_s,
            step_timeout_s=120.0 if model.fast_s else 10.0,
            context_tokens_max=4096,
            episode_tokens_max=4096,
            placement=model.placement,
            admission=model.admission,
            probes=model.probes,
            generate_timeout_s=20.0,
            reserve_tokens=40,
            interleave_groups=2,
            fair_hold_s=30.0,
            keepalive_tokens=200,
            prefix_block_tokens=BLOCK,
            prefix_entries_max=200,
            probe_timeout_s=5.0,
            probe_pause_s=1.0,
            probe_pause_max_s=8.0,
            wedge_s=model.wedge_s,
        )
        self.watch = Watch(rules, self.engines, self.shared.problem)
        self._claimed = set()
        self._listed = ((), ())
        self.machine = self._make(rules)
        streams = ModelStreams(self.store, role="router", epoch=self.epoch)
        self.durable = Durable(ModelRedis(self.store), streams)  # type: ignore[arg-type]
        self.calls = self._calls(self, model, self._task_of, self.feed, self.watch, BLOCK)
        self._poll()
        self._follow()
        self.every(0.25, lambda: self.feed(e.Tick()))
        if model.probes or model.admission != "none":
            self.every(1.0, self._ask_replicas)
        self.slowly(self._recover(), self._recovered, "recover")

    def _task_of(self, group: str) -> str:
        _, index = job_and_index(group) or (group, 0)
        return tasks()[index % len(tasks())].name

    async def _recover(self) -> None:
        """Each read is a call of its own, and other events come in between."""
        async for event in self.durable.recover(self.model.repairs_max, self.calls):
            self.feed(event)

    def _recovered(self, found: Any) -> None:
        if isinstance(found, MusterError):
            self.exit(f"recover: {found.problem}")
        else:
            self.shared.announce(self)

    def feed(self, event: e.RouterEvent) -> None:
        if self.machine is None:
            return
        commands = self.machine.handle(event, self.world.now)
        self.world.record(self.name, event, commands)
        self.watch.heard(event, commands, self.world.now)
        for command in commands:
            self._execute(command)

    # loops

    def _poll(self) -> None:
        """The registry, twice a second."""

        def heard(_: Any) -> None:
            found = (
                tuple(self.shared.listed("inference", self)),
                tuple(self.shared.listed("sandbox", self)),
            )
            self._claim({*found[0], *found[1]})
            before, self._listed = self._listed, found
            if found[0] != before[0]:
                self.feed(e.ReplicasListed(tuple(e.Replica(r, r) for r in found[0])))
            if found[1] != before[1]:
                self.feed(e.HostsListed(tuple(e.Host(h, h) for h in found[1])))
            self.soon(_POLL_S, self._poll)

        self.at_store("poll", lambda: None, heard)

    def _claim(self, present: set[str]) -> None:
        processes = {(name, self.shared.processes[name].life) for name in present}
        for one in sorted(processes - self._claimed):
            self.calls.claim(one[0], RUN, self.epoch, lambda ok, o=one: self._claims(ok, o))  # type: ignore[misc]
        self._claimed &= processes

    def _claims(self, ok: bool, process: tuple[str, int]) -> None:
        if ok:
            self._claimed.add(process)

    def _follow(self) -> None:
        """What the bank and the trainer appended."""

        def heard(found: Any) -> None:
            if found is None:
                for event in at_once(self.durable.follow()):
                    self.feed(event)
                self.patiently_slowly(self.durable.mark_read, lambda _: self._follow(), "read")
            else:
                self.soon(0.5, self._follow)

        positions = {stream: self.durable.positions[stream] for stream in TAILED}
        self.news(positions, heard)

    def _ask_replicas(self) -> None:
        """Each listed one for a credit, which also tells how it fares."""
        for name in self._listed[0]:
            self.calls.replicas.grant(name, self.epoch, self.feed)

    # commands

    def _execute(self, command: e.RouterCommand) -> None:
        match command:
            case e.Generate():
                self.calls.generate(command, self.feed)
            case e.Exec():
                self.calls.exec(command, self.feed)
            case e.AcquireBox():
                self.calls.acquire(command, self.feed)
            case e.Verify():
                self.calls.verify(command, self.feed)
            case e.ReleaseBox():
                self.watch.released(command)
                self.calls.release(command)
            case e.DropConversation():
                self.calls.drop(command.episode)
            case e.TellStall():
                pass
            case e.AbortGenerate() | e.Touch() | e.ProbeReplica():
                self._at_replica(command)
            case _:
                self._record(command)

    def _at_replica(self, command: e.AbortGenerate | e.Touch | e.ProbeReplica) -> None:
        match command:
            case e.AbortGenerate():
                self.calls.abort(command)
            case e.Touch():
                self.calls.touch(command)
            case e.ProbeReplica():
                self.calls.replicas.probe(command, self.feed)

    def _record(self, command: Any) -> None:
        """An append, repeated until it is durable."""
        name = type(command).__name__
        durable = self.durable
        match command:
            case e.OpenGroup():
                key = EpisodeKey(RUN, command.group, 0, 0, self.epoch)
                prompt = _prompt(self._task_of(command.group))
                opened = e.GroupRecorded(command.group, len(prompt), blocks(prompt, BLOCK))
                self._write(name, lambda: durable.open_group(command, key), opened)
            case e.RecordIntent():
                segments = self.calls.conversation(command.episode).take_segments()
                usage = self.calls.usage.get(command.episode.id, TurnUsage())
                self.watch.recorded(command.episode, command.turn, segments)
                done = e.IntentRecorded(command.episode, command.turn)
                self._write(name, lambda: durable.record_intent(command, segments, usage), done)
            case e.RecordTurn():
                segments = self.calls.conversation(command.episode).take_segments()
                usage = self.calls.usage.get(command.episode.id, TurnUsage())
                self.watch.recorded(command.episode, command.turn, segments)
                turned = e.TurnRecorded(command.episode, command.turn)
                self._write(name, lambda: durable.record_turn(command, segments, usage), turned)
            case e.RecordRestored():
                restored = e.RestoredRecorded(command.episode, command.repair)
                self._write(name, lambda: durable.record_restored(command), restored)
            case e.RecordEpisode():
                self.watch.over(command.episode)
                self._write(
                    name,
                    lambda: durable.record_episode(command),
                    e.EpisodeRecorded(command.episode),
                )

    def _write(self, name: str, effect: Any, event: e.RouterEvent) -> None:
        cuts = len(self.store.cut_at)

        def heard(_: Any) -> None:
            if isinstance(event, e.EpisodeRecorded) and len(self.store.cut_at) == cuts:
                self.acked.add(event.episode.id)
            self.feed(event)

        self.patiently_slowly(effect, heard, name)

    def told(self) -> str:
        """What it says it waits for."""
        if self.machine is None:
            return "stands by or is down"
        found = self.machine.progress(JOB, self.world.now)
        return "knows no job" if found is None else found.waiting_for or "runs"

    @property
    def idle(self) -> bool:
        """It leads, and no episode runs."""
        if self.machine is None:
            return False
        jobs = (JOB, EVALUATION) if self.model.evaluated else (JOB,)
        found = [self.machine.progress(job, self.world.now) for job in jobs]
        return all(job is not None and job.episodes_running == 0 for job in found)


@functools.cache
def _prompt(task: str) -> tuple[int, ...]:
    """Ids that all siblings of its groups begin with."""
    conversation = Conversation(CODEC)
    instruction = next(t.instruction for t in tasks() if t.name == task)
    conversation.open(chat.opening(instruction))
    return tuple(conversation.context)


def submit(shared: Shared, model: Model) -> None:
    """What SubmitTaskSet makes durable."""

    spec = e.JobSpec(
        id=JOB,
        tasks=tuple(task_info(t) for t in tasks()),
        groups=model.groups,
        group_size=model.group_size,
        sampling=SamplingParams(seed=7),
        submitted_unix_s=0.0,
    )
    held = replace(spec, id=EVALUATION, groups=model.evaluated, purpose=Purpose.EVALUATE)
    streams = ModelStreams(shared.store)
    durable = Durable(ModelRedis(shared.store), streams)  # type: ignore[arg-type]
    for job in [spec, held] if model.evaluated else [spec]:
        at_once(durable.submit(job, list(tasks())))
