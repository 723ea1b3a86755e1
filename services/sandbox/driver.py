"""Runs boxes for callers: the pool's commands, the steps and verdicts of each box.

Owns: every task in flight. Promise: a caller that goes away changes nothing: its start, step or
verification runs on and its answer is kept for the repeat of the call; closing ends all boxes;
what the backend could not do is Unavailable, never a result that could be scored.
Does not cover: the wire (server.py), how a box is made (adapters/).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from muster import telemetry
from muster.archive import unpack
from muster.clock import monotonic
from muster.errors import InvalidInput, MusterError, Refused, Unavailable
from muster.taskset import Task, TaskFile, task_from_archive
from muster.types import EpisodeKey, Limits, Value
from services.sandbox import checks, environment, limits, pool, verdict
from services.sandbox.box import Backend, BoxFailure, Evidence
from services.sandbox.config import SandboxConfig
from services.sandbox.ledger import Decision, Ledger, StepRecord

_log = telemetry.logger("muster.sandbox")
_TICK_S = 0.25
_TASKS_KEPT = 64
_ENDS_MAX = 3  # tries to end one box; each may take as long as the backend is patient
T = TypeVar("T")


class Acquired(Value, frozen=True):
    """A box ready for its first step; start_s is its start and set-up, without waiting."""

    box: str
    start_s: float
    workdir: str


class Verified(Value, frozen=True):
    """A verdict and the verifier's run."""

    verdict: verdict.Verdict
    evidence: Evidence


class _Box:
    """What the driver keeps of one box."""

    def __init__(self, key: EpisodeKey, task: Task, files: dict[str, TaskFile], granted: Limits):
        self.key, self.task, self.files, self.limits = key, task, files, granted
        self.ledger: Ledger = Ledger()
        self.step: asyncio.Task[StepRecord | Unavailable] | None = None
        self.verification: asyncio.Task[Verified | Unavailable] | None = None
        self.acquired: Acquired | None = None
        self.touched = False  # a step or verification was asked for
        self.ended = asyncio.Event()


class _Ask:
    """A caller waiting for a box."""

    def __init__(self, box: _Box):
        self.box = box
        self.answer: asyncio.Future[Acquired] = asyncio.get_running_loop().create_future()
        self.ticket = 0
        self.name = ""  # of the box, once its start has begun
        self.callers = 0


class SandboxHost:
    """Use as a context manager; all methods raise MusterError."""

    def __init__(self, backend: Backend, config: SandboxConfig, host: str):
        self.host = host
        self._backend, self._config = backend, config
        rules = pool.PoolRules(
            boxes_max=config.boxes_max,
            starting_max=config.starting_max,
            waiting_max=config.waiting_max,
            idle_s=config.idle_s,
        )
        self._pool = pool.Pool(rules, prefix=f"b{secrets.token_hex(3)}")
        self._most = Limits(
            config.memory_bytes_max,
            config.pids_max,
            config.disk_bytes_max,
            config.disk_inodes_max,
            config.output_bytes_max,
        )
        self._asks: dict[int, _Ask] = {}
        self._by_key: dict[EpisodeKey, _Ask] = {}
        self._boxes: dict[str, _Box] = {}
        self._known: OrderedDict[str, tuple[Task, dict[str, TaskFile]]] = OrderedDict()
        self._verifying = asyncio.Semaphore(config.verifying_max)
        self._tickets = 0
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[Any]] = set()
        self._stopped = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._spawn(self._tick(), "sandbox-ticks")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        await self._tasks.__aexit__(kind, error, trace)

    def stop(self) -> None:
        """Answer every caller now, with Unavailable, and refuse new ones; waits for nothing."""
        self._stopped = True
        for ask in self._by_key.values():
            _settle(ask, _stops())
        for task in self._running:
            task.cancel()  # the backend ends with us, and all boxes with it

    @property
    def boxes(self) -> int:
        return len(self._boxes)

    async def acquire(
        self, key: EpisodeKey, name: str, digest: str, archive: bytes, asked: Limits, wait_s: float
    ) -> Acquired:
        """A box prepared for the task; the same call again gives the same box while unused."""
        if self._stopped:
            raise _stops()
        task, files = self._task(name, digest, archive)
        task_limits = limits.of_task(task.memory_bytes, task.disk_bytes)
        granted = limits.resolve(asked, task_limits, self._most)
        ask = self._by_key.get(key)
        if ask is None:
            ask = _Ask(_Box(key, task, files, granted))
            ask.box.ledger = Ledger(steps_max=self._config.steps_max)
            self._by_key[key] = ask
            self._tickets += 1
            ask.ticket = self._tickets
            self._asks[ask.ticket] = ask
            self._feed(pool.Asked(ask.ticket, key, monotonic() + wait_s))
        elif ask.box.touched:
            raise Refused(
                "this attempt has a box that ran steps already",
                field="episode",
                value=key.id,
                way_out="open a new attempt",
            )
        self._feed(pool.Spoke(key))
        ask.callers += 1
        try:
            return await asyncio.shield(ask.answer)
        finally:
            ask.callers -= 1
            if not ask.callers and not ask.answer.done():
                self._abandon(ask)

    def _abandon(self, ask: _Ask) -> None:
        """Every caller left before the box was there: nobody would ever use or release it."""
        self._by_key.pop(ask.box.key, None)
        self._asks.pop(ask.ticket, None)
        self._feed(pool.Released(ask.name) if ask.name else pool.GaveUp(ask.ticket))

    async def execute(
        self, key: EpisodeKey, name: str, turn: int, command: str, timeout_s: float
    ) -> tuple[StepRecord, bool]:
        """Run a step once; True with a record that is kept from an earlier call."""
        box = self._find(key, name)
        checks.step(self._config, command, timeout_s)
        decision = box.ledger.decide(turn, command)
        if decision is Decision.REPEAT:
            return box.ledger.kept(turn), True
        if decision is Decision.RUN:
            box.ledger.begin(turn, command)
            box.step = self._spawn(self._step(name, box, command, timeout_s), f"step-{name}")
        assert box.step is not None
        return _known(await _share(box.step)), decision is Decision.WAIT

    async def verify(self, key: EpisodeKey, name: str) -> Verified:
        """End the agent, seal its files, judge them; again: once more over the same files."""
        box = self._find(key, name)
        if box.verification is None or box.verification.done():
            if box.step and not box.step.done():
                raise Refused(
                    "a step of this box is running", field="box", value=name, way_out="wait for it"
                )
            box.ledger.closed = "its files are sealed for verification"
            box.verification = self._spawn(self._judge(name, box), f"verify-{name}")
        return _known(await _share(box.verification))

    async def release(self, key: EpisodeKey, name: str) -> bool:
        """End a box; False when it is not there (any more)."""
        if self._stopped:
            raise _stops()
        self._feed(pool.Spoke(key, name))
        refusal = self._pool.refusal(key, name)
        box = self._boxes.get(name)
        if refusal is not None:
            if refusal.code == "NOT_FOUND":
                return False
            raise refusal
        self._feed(pool.Released(name))
        if box:
            await box.ended.wait()
        return True

    def _find(self, key: EpisodeKey, name: str) -> _Box:
        if self._stopped:
            raise _stops()
        self._feed(pool.Spoke(key, name))
        refusal = self._pool.refusal(key, name)
        if refusal is not None:
            raise refusal
        box = self._boxes[name]
        box.touched = True
        return box

    def _task(self, name: str, digest: str, archive: bytes) -> tuple[Task, dict[str, TaskFile]]:
        known = self._known.get(digest)
        if known is None:
            if hashlib.sha256(archive).hexdigest() != digest:
                raise InvalidInput(
                    "is not the sha256 of the archive",
                    field="task.digest",
                    value=digest[:80],
                    way_out="send the archive as it was packed",
                )
            known = (task_from_archive(archive, name=name), unpack(archive))
            self._known[digest] = known
            if len(self._known) > _TASKS_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(digest)
        return known

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = self._tasks.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _feed(self, event: pool.Event) -> None:
        for command in self._pool.handle(event, monotonic()):
            match command:
                case pool.StartBox(ticket, box, _):
                    self._spawn(self._start(self._asks.pop(ticket), box), f"start-{box}")
                case pool.RefuseTicket(ticket):
                    ask = self._asks.pop(ticket)
                    self._by_key.pop(ask.box.key, None)
                    _settle(ask, pool.refused(command))
                case pool.EndBox(box, why):
                    self._spawn(self._end(box, why), f"end-{box}")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._feed(pool.Ticked())

    async def _start(self, ask: _Ask, name: str) -> None:
        box = ask.box
        ask.name = name
        began = monotonic()
        try:
            with telemetry.span("box.start", box=name, task=box.task.name):
                await self._backend.start(name, box.limits)
                self._boxes[name] = box
                await self._prepare(name, box)
        except (BoxFailure, MusterError) as failure:
            _log.warning("box %s did not start: %s", name, failure)
            self._by_key.pop(box.key, None)
            self._boxes.pop(name, None)
            await self._end_backend(name)
            self._feed(pool.StartFailed(name))
            if isinstance(failure, BoxFailure):
                failure = pool.start_trouble(str(failure))
            _settle(ask, failure)
            return
        box.acquired = Acquired(name, monotonic() - began, box.task.workdir)
        self._feed(pool.Started(name))
        if not ask.answer.done():
            ask.answer.set_result(box.acquired)

    async def _prepare(self, name: str, box: _Box) -> None:
        for action in environment.actions(box.task, box.files):
            match action:
                case environment.Put(files):
                    await self._backend.put(name, files)
                case environment.Enter(cwd, env):
                    await self._backend.set_session(name, cwd, env)
                case environment.RunSetup(command, shown):
                    timeout_s = self._config.setup_timeout_s
                    found = await self._backend.run(name, command, timeout_s)
                    checks.setup(shown, found, _printed(found))

    async def _step(
        self, name: str, box: _Box, command: str, timeout_s: float
    ) -> StepRecord | Unavailable:
        try:
            with telemetry.span("box.step", box=name):
                evidence = await self._backend.run(name, command, timeout_s)
        except BoxFailure as failure:
            _log.warning("box %s lost a step: %s", name, failure)
            box.ledger.lose(f"the result of a step was lost ({failure})")
            return _lost(f"the step's result is lost: {failure}")
        return box.ledger.finish(evidence)

    async def _judge(self, name: str, box: _Box) -> Verified | Unavailable:
        spec = environment.judge_spec(box.task, box.files, box.limits)
        most = self._config.verify_timeout_s_max
        spec = environment.bounded(spec, most)
        async with self._verifying:
            with telemetry.span("box.verify", box=name):
                try:
                    await self._backend.seal(name)
                    judged = await self._backend.judge(name, spec)
                except BoxFailure as failure:
                    _log.warning("box %s could not be judged: %s", name, failure)
                    return _lost(f"the host could not judge: {failure}")
        return Verified(verdict.read(judged), judged.evidence)

    async def _end(self, name: str, why: str) -> None:
        _log.debug("box %s ends: %s", name, why)
        box = self._boxes.pop(name, None)
        if box and box.verification and not box.verification.done():
            box.verification.cancel()  # it ends the verifier's box on its way out
            await asyncio.wait([box.verification])
        try:
            await self._end_backend(name)
        finally:
            if box:
                box.ended.set()
        self._feed(pool.Ended(name))
        if box and self._by_key.get(box.key) and self._by_key[box.key].box is box:
            del self._by_key[box.key]

    async def _end_backend(self, name: str) -> None:
        for _ in range(_ENDS_MAX):
            try:
                await self._backend.end(name)
                return
            except BoxFailure as failure:
                # After the last, the keeper's end or the sweep of the next start removes it.
                _log.error("box %s could not be ended: %s", name, failure)


async def _share(task: asyncio.Task[T]) -> T:
    """Wait for a task that others wait for too; one waiter's end does not end it."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled():
            raise Unavailable(
                "the box was ended meanwhile", field="box", way_out="open a new attempt"
            ) from None
        raise


def _printed(found: Evidence) -> str:
    return telemetry.printable((found.head + found.tail).decode("utf-8", "replace"))


def _known(result: T | Unavailable) -> T:
    if isinstance(result, Unavailable):
        raise result
    return result


def _lost(problem: str) -> Unavailable:
    return Unavailable(problem, field="box", way_out="open a new attempt, on another host if any")


def _stops() -> Unavailable:
    return Unavailable("this sandbox host stops", way_out="use another host")


def _settle(ask: _Ask, error: MusterError) -> None:
    if not ask.answer.done():
        ask.answer.set_exception(error)
        ask.answer.exception()  # a caller that left must not make the loop complain
