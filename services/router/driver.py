"""The router's shell: commands become calls and appends, what comes back becomes events.

Owns: the tasks that watch and tail, the patience with Redis, the watchers' wake-up. Promise: an
append is repeated until it is durable or `redis_patience_s` is over, then the service stops
rather than lose a turn; a fenced router stops at once. Does not cover: decisions (machine.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from muster import telemetry
from muster.clock import monotonic, wall
from muster.driver import MachineDriver
from muster.errors import Exhausted, InvalidInput, NotFound, Unavailable
from muster.journal import Journal
from muster.patience import patiently
from muster.redis_link import reaching_redis
from muster.registry import Registry
from muster.tasks import end
from muster.taskset import Task
from muster.types import EpisodeKey, JobPolicy, Purpose, SamplingParams, Waiting, job_and_index
from muster.v1 import events_pb2 as ev
from muster.v1 import router_pb2 as pb
from services.router import builders, chat
from services.router import events as e
from services.router.adapters.calls import Calls
from services.router.adapters.durable import Durable, task_info
from services.router.adapters.restore import TurnUsage
from services.router.adapters.watching import FleetWatch
from services.router.config import RouterConfig
from services.router.jobs import JobProgress, JobState
from services.router.machine import RouterMachine

R = TypeVar("R")
_log = telemetry.logger("router")
_MEMORY_S = 2.0
_TRACES_MAX = 10_000


class RouterDriver:
    """One incarnation of the router."""

    def __init__(
        self,
        machine: RouterMachine,
        calls: Calls,
        durable: Durable,
        registry: Registry,
        journal: Journal,
        section: RouterConfig,
        *,
        memory: Callable[[], Awaitable[str]] | None = None,
        logs: str = "logs",
    ):
        """`memory` answers why Redis has no room for more, "" when it has; `logs`: a folder."""
        self._memory, self._logs = memory, logs
        self._machine, self._calls, self._durable = machine, calls, durable
        self._registry, self._section = registry, section
        self._watchers: set[asyncio.Event] = set()
        self._traces: dict[str, str] = {}  # job or group id → traceparent of what began it
        # Groups become durable in the order in which they were opened: the bank tells by it who
        # was overtaken, a restart reads it, and the first launches follow it.
        self._openings = asyncio.Lock()
        self._driver: MachineDriver[e.RouterEvent, e.RouterCommand] = MachineDriver(
            machine, self._execute, journal, after=self._wake
        )
        rules = machine.rules
        self._watch = FleetWatch(registry, calls, rules.run, rules.owner_epoch, self._driver.feed)

    # -- running -----------------------------------------------------------------------

    async def recover(self) -> None:
        """Tell the machine everything durable, while run() runs and before clients are served."""
        count = 0
        async for event in self._durable.recover(self._machine.rules.repairs_max, self._calls):
            await self._driver.apply(event)
            count += 1
        self._traces |= dict(list(self._durable.traces.items())[-_TRACES_MAX:])
        _log.info("recovered from %d records", count, extra={"run": self._machine.rules.run})

    async def run(self, stopping: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._watch.poll(), name="poll-registry"),
                tasks.create_task(self._watch.ask(), name="ask-replicas"),
                tasks.create_task(self._follow(), name="follow-streams"),
                tasks.create_task(self._driver.ticks(e.Tick, 0.25), name="ticks"),
                tasks.create_task(self._watch_memory(), name="watch-memory"),
            ]
            try:
                await self._driver.run(stopping)
            finally:
                self._wake()
                await end(*background)

    async def _watch_memory(self) -> None:
        """Tell the machine when Redis is nearly full, and when it no longer is."""
        told = ""
        while self._memory is not None:
            try:
                problem = await self._memory()
            except Unavailable as error:
                _log.warning("Redis cannot be asked for its memory: %s", error)
                problem = told
            if bool(problem) != bool(told):
                _log.warning("launches: %s", problem or "there is room again")
                await self._driver.feed(e.MemoryTold(problem))
                told = problem
            await asyncio.sleep(_MEMORY_S)

    async def _follow(self) -> None:
        marked: dict[str, str] = {}
        while True:
            for event in await self._patiently(self._durable.follow):
                await self._driver.feed(event)
            if marked != self._durable.positions:
                await self._patiently(self._durable.mark_read)
                marked = dict(self._durable.positions)

    async def _execute(self, command: e.RouterCommand) -> e.RouterEvent | None:
        """One command, in the trace of its group, which is in the trace of its submission."""
        if isinstance(command, e.TellStall):
            waits = (f"{w.subject}: {w.state}, waits for {w.waits_for}" for w in command.lines)
            _log.warning("nothing moves: %s", "; ".join(waits))
            return None
        if isinstance(command, e.ProbeReplica):
            rules = self._machine.rules
            return await self._calls.replicas.probe(command, rules.run, rules.owner_epoch)
        parent = self._traces.get(_begun_by(command), "")
        with telemetry.span(type(command).__name__, parent=parent, **_attributes(command)):
            if isinstance(command, e.OpenGroup):
                self._remember(command.group)
            match command:
                case e.Generate():
                    return await self._calls.generate(command)
                case e.Exec():
                    return await self._calls.exec(command)
                case e.AcquireBox():
                    return await self._calls.acquire(command)
                case e.Verify():
                    return await self._calls.verify(command)
                case e.OpenGroup() | e.RecordEpisode():
                    return await self._record(command)
                case e.RecordIntent() | e.RecordTurn() | e.RecordRestored():
                    return await self._record_turn(command)
                case _:
                    await self._clean_up(command)
                    return None

    def _remember(self, begun: str) -> None:
        """The current span as the parent of what a job or group leads to; bounded."""
        while len(self._traces) >= _TRACES_MAX:
            self._traces.pop(next(iter(self._traces)))
        self._traces[begun] = telemetry.traceparent()

    async def _record(self, command: e.OpenGroup | e.RecordEpisode) -> e.RouterEvent:
        match command:
            case e.OpenGroup():
                rules = self._machine.rules
                key = EpisodeKey(rules.run, command.group, 0, 0, rules.owner_epoch)
                # Encoded beside each other, in threads; only records and answers are in order.
                async with asyncio.TaskGroup() as tasks:
                    name = f"open-{command.group}"
                    opening = tasks.create_task(self._opening(command), name=name)
                    async with self._openings:
                        await self._patiently(lambda: self._durable.open_group(command, key))
                        return e.GroupRecorded(command.group, *await opening)
            case e.RecordEpisode():
                await self._patiently(lambda: self._durable.record_episode(command))
                return e.EpisodeRecorded(command.episode)

    async def _opening(self, command: e.OpenGroup) -> tuple[int, tuple[int, ...]]:
        """Tokens and blocks of the prompt that the group's siblings share."""
        job, found = self._machine.job(command.job), job_and_index(command.group)
        if job is None or found is None:
            return 0, ()
        tasks = job.spec.tasks
        instruction = tasks[found[1] % len(tasks)].instruction
        return await self._calls.prompt(chat.opening(instruction))

    async def _record_turn(
        self, command: e.RecordIntent | e.RecordTurn | e.RecordRestored
    ) -> e.RouterEvent:
        episode = command.episode
        if isinstance(command, e.RecordRestored):
            restored = command
            await self._patiently(lambda: self._durable.record_restored(restored))
            return e.RestoredRecorded(episode, command.repair)
        segments = self._calls.conversation(episode).take_segments()
        usage = self._calls.usage.get(episode.id, TurnUsage())
        if isinstance(command, e.RecordIntent):
            intent = command
            await self._patiently(lambda: self._durable.record_intent(intent, segments, usage))
            return e.IntentRecorded(episode, command.turn)
        turn = command
        await self._patiently(lambda: self._durable.record_turn(turn, segments, usage))
        return e.TurnRecorded(episode, command.turn)

    async def _clean_up(
        self, command: e.AbortGenerate | e.ReleaseBox | e.DropConversation | e.Touch
    ) -> None:
        match command:
            case e.Touch():
                await self._calls.touch(command.episode, command.replica)
            case e.AbortGenerate():
                await self._calls.abort(command)
            case e.ReleaseBox():
                await self._calls.release(command)
            case e.DropConversation():
                self._calls.drop(command.episode)

    async def _patiently(self, effect: Callable[[], Awaitable[R]]) -> R:
        """Repeat an idempotent effect while Redis is away, within a bound."""
        return await patiently(
            "Redis",
            effect,
            patience_s=self._section.redis_patience_s,
            first_s=0.05,
            most_s=2.0,
            field="router.redis_patience_s",
        )

    # -- what clients ask --------------------------------------------------------------

    async def submit(
        self,
        job: str,
        tasks: list[Task],
        groups: int,
        group_size: int,
        sampling: SamplingParams,
        policy: JobPolicy | None = None,
        purpose: Purpose = Purpose.TRAIN,
    ) -> str:
        """Make a task set durable, then start on it. Equal repeats have no further effect."""
        spec = e.JobSpec(
            id=job,
            tasks=tuple(task_info(t) for t in tasks),
            groups=groups,
            group_size=group_size,
            sampling=sampling,
            submitted_unix_s=wall(),
            policy=policy or JobPolicy(),
            purpose=purpose,
        )
        known = self._machine.job(job)
        if known is not None:
            if not _same(known.spec, spec):
                raise _other_task_set(job)
            return job
        if self._machine.jobs_running() >= self._section.jobs_max:
            raise Exhausted(
                "too many jobs are running",
                field="router.jobs_max",
                value=self._section.jobs_max,
                way_out="wait for one to end, or cancel one",
            )
        hosts = await self._patiently(self._told_by_hosts)
        builders.check(tasks, hosts, self._machine.rules.limits)
        self._remember(job)
        await self._patiently(lambda: self._durable.submit(spec, tasks))
        await self._driver.apply(e.JobSubmitted(spec))
        taken = self._machine.job(job)
        if taken is None or not _same(taken.spec, spec):  # somebody else's came first
            raise _other_task_set(job)
        return job

    async def _told_by_hosts(self) -> list[dict[str, str]]:
        """Of each announced sandbox host, what it tells of itself."""
        with reaching_redis():
            return [entry.info for entry in await self._registry.list("sandbox")]

    async def cancel(self, job: str) -> JobProgress:
        """Stop a job for good; its open groups are given up."""
        found = self.progress(job)
        if ended(found):
            return found
        await self._patiently(lambda: self._durable.cancel(job))
        await self._driver.apply(e.JobCancelled(job))
        return self.progress(job)

    def progress(self, job: str) -> JobProgress:
        found = self._machine.progress(job, monotonic())
        if found is None:
            raise NotFound(
                "there is no such job",
                field="job",
                value=job,
                way_out="use the id that `muster submit` printed",
            )
        return found

    def explain(self, subject: str) -> list[Waiting]:
        """What waits, and for what; raises NotFound for what neither runs nor waits."""
        found = self._machine.explain(subject, monotonic(), wall(), self._logs)
        if not found:
            raise NotFound(
                "nothing of this name runs or waits",
                field="subject",
                value=subject,
                way_out="`muster explain` lists what does; `muster report` tells what has ended",
            )
        return found

    async def evaluation(self, job: str) -> tuple[pb.EvaluationHeader, list[ev.EvaluatedGroup]]:
        """What an evaluation has come to so far; NotFound, or InvalidInput when it is none."""
        self.progress(job)
        found, training = self._machine.job(job), self._machine.training()
        assert found is not None
        if not found.spec.evaluates:
            raise InvalidInput(
                "this job is none of evaluation",
                field="job",
                value=job,
                way_out="its groups are trained on: `muster report` tells of them",
            )
        fleet, reads = self._machine.replicas(), self._durable.evaluations
        spec = training.spec if training else None
        told = await reads.serving(self._calls.replicas, fleet)
        header = await self._patiently(lambda: reads.header(found, spec, told))
        return header, await self._patiently(lambda: reads.groups(job))

    async def watch(self, job: str) -> asyncio.Event:
        """An event that is set whenever something may have changed; give it back to unwatch()."""
        self.progress(job)
        if len(self._watchers) >= self._section.watchers_max:
            raise Exhausted(
                "too many watchers",
                field="router.watchers_max",
                value=self._section.watchers_max,
                way_out="poll GetJob, or raise the bound",
            )
        changed = asyncio.Event()
        changed.set()
        self._watchers.add(changed)
        return changed

    def unwatch(self, changed: asyncio.Event) -> None:
        self._watchers.discard(changed)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()


def ended(progress: JobProgress) -> bool:
    """True when a job will not change any more."""
    return progress.state is not JobState.RUNNING


def _same(one: e.JobSpec, other: e.JobSpec) -> bool:
    """True when they ask for the same; the time of asking does not count."""
    return msgspec.structs.replace(one, submitted_unix_s=other.submitted_unix_s) == other


def _other_task_set(job: str) -> InvalidInput:
    return InvalidInput(
        "this id names another task set",
        field="job",
        value=job,
        way_out="choose a new id, or leave it empty",
    )


def _begun_by(command: e.TracedCommand) -> str:
    return command.job if isinstance(command, e.OpenGroup) else command.episode.group


def _attributes(command: e.TracedCommand) -> dict[str, str]:
    if isinstance(command, e.OpenGroup):
        return {"muster.group": command.group}
    return {"muster.episode": command.episode.id}
