"""Runs boxes for callers: the pool's commands, the steps and verdicts of each box.

Owns: every task in flight. Promise: a caller that goes away, or is fenced, changes nothing: its
start, step or verification runs on and its answer is kept for the repeat of the call, by whoever
owns the attempt then. A box that the backend lost is ended and told as NotFound with the field
`box`, here and in every later call; any other trouble of the backend is Unavailable. Neither is a
result that could be scored. Closing ends all boxes.
Does not cover: the wire (server.py), how a box is made (adapters/).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from muster import failpoints, telemetry
from muster.clock import monotonic
from muster.errors import MusterError, NotFound, Refused, Unavailable
from muster.types import EpisodeKey, Limits
from services.sandbox import checks, environment, limits, pool, verdict
from services.sandbox.adapters.callers import (
    Acquired,
    Ask,
    Living,
    UsedBox,
    Verified,
    Waiting,
    counted,
    known,
    lost,
    stops,
)
from services.sandbox.box import Backend, BoxFailure
from services.sandbox.config import SandboxConfig
from services.sandbox.ledger import Decision, Ledger, StepRecord
from services.sandbox.packages import KnownTasks

_log = telemetry.logger("muster.sandbox")
_TICK_S = 0.25
_TASKS_KEPT = 64
_ENDED = "the box was ended meanwhile"
_ENDS_MAX = 3  # tries to end one box; each may take as long as the backend is patient
T = TypeVar("T")


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
            adopt_s=config.adopt_s,
        )
        self._pool = pool.Pool(rules, prefix=f"b{secrets.token_hex(3)}")
        self._most = limits.most(config)
        self.fenced_calls = 0
        self._asks: dict[int, Ask] = {}  # by ticket, until their start begins
        self._attempts: dict[EpisodeKey, Ask] = {}  # by the identity of their boxes
        self._boxes: dict[str, UsedBox] = {}
        self._waiting = Waiting()
        self._known = KnownTasks(_TASKS_KEPT)
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
        for ask in self._attempts.values():
            ask.settle(stops())
        for task in self._running:
            task.cancel()  # the backend ends with us, and all boxes with it

    @property
    def boxes(self) -> int:
        return len(self._boxes)

    @counted
    async def claim(self, run: str, owner_epoch: int) -> list[Living]:
        """A router owns the run: older epochs are refused from now on. The run's living boxes."""
        self._hear(run, owner_epoch, pool.Claimed(run, owner_epoch))
        return [
            Living(name, key, self._boxes[name].ledger.newest)
            for name, key in self._pool.living(run).items()
        ]

    @counted
    async def acquire(
        self,
        key: EpisodeKey,
        name: str,
        digest: str,
        archive: bytes,
        asked: Limits,
        wait_s: float,
        *,
        fresh: bool = False,
    ) -> Acquired:
        """A box prepared for the task; the same call again gives the same box while unused.

        fresh: a box of this attempt that was used is ended first. Without it that is Refused.
        """
        self._hear(key.run, key.owner_epoch, pool.Spoke(key))
        task, files = self._known.task(name, digest, archive)
        task_limits = limits.of_task(task.memory_bytes, task.disk_bytes)
        granted = limits.resolve(asked, task_limits, self._most)
        await self._clear(key, fresh)
        ask = self._attempts.get(pool.identity(key))
        if ask is None:
            ledger = Ledger(steps_max=self._config.steps_max, kept_max=self._config.answers_kept)
            ask = self._ask(key, UsedBox(task, files, granted, ledger), wait_s)
        self._feed(pool.Spoke(key, ask.name))
        ask.callers += 1
        try:
            got = await self._waiting.for_(key, ask.answer)
        finally:
            ask.callers -= 1
            if not ask.callers and not ask.answer.done():
                self._abandon(key, ask)
        await failpoints.at("sandbox.start.after")
        return got

    async def _clear(self, key: EpisodeKey, fresh: bool) -> None:
        """Wait for the end of a box of this attempt that can be used no more."""
        while (ask := self._attempts.get(pool.identity(key))) and ask.box.acquired:
            gone = self._pool.refusal(key, ask.name) is not None
            if not gone and not ask.box.touched:
                return
            if not gone and not fresh:
                raise Refused(
                    "this attempt has a box that ran steps already",
                    field="episode",
                    value=key.id,
                    way_out="go on in that box, or ask for a fresh one, which ends it",
                )
            self._feed(pool.Released(ask.name))
            await ask.box.ended.wait()
            self._hear(key.run, key.owner_epoch, pool.Spoke(key))

    def _ask(self, key: EpisodeKey, box: UsedBox, wait_s: float) -> Ask:
        self._tickets += 1
        ask = Ask(pool.identity(key), box, self._tickets)
        self._attempts[ask.attempt] = self._asks[ask.ticket] = ask
        self._feed(pool.Asked(ask.ticket, key, monotonic() + wait_s))
        return ask

    def _abandon(self, key: EpisodeKey, ask: Ask) -> None:
        """Every caller left before the box was there: nobody would ever use or release it.

        Unless they were fenced: then the start goes on, for the new owner.
        """
        if ask.name and self._pool.fence(key.run, key.owner_epoch):
            return
        self._attempts.pop(ask.attempt, None)
        self._asks.pop(ask.ticket, None)
        self._feed(pool.Released(ask.name) if ask.name else pool.GaveUp(ask.ticket))

    @counted
    async def execute(
        self,
        key: EpisodeKey,
        name: str,
        turn: int,
        command: str,
        timeout_s: float,
        *,
        after: int | None = None,
    ) -> tuple[StepRecord, bool]:
        """Run a step once; True with a record that is kept from an earlier call.

        after: the newest turn that ran in this box by the caller's records (Ledger.check).
        """
        await failpoints.at("sandbox.exec.before")
        box = self._find(key, name)
        checks.step(self._config, command, timeout_s)
        decision = box.ledger.decide(turn, command, after, name)
        if decision is Decision.REPEAT:
            return box.ledger.kept(turn), True
        if decision is Decision.RUN:
            box.ledger.begin(turn, command)
            box.step = self._spawn(self._step(name, box, command, timeout_s), f"step-{name}")
        assert box.step is not None
        record = known(await self._wait(key, name, box.step))
        await failpoints.at("sandbox.exec.after")
        return record, decision is Decision.WAIT

    @counted
    async def verify(self, key: EpisodeKey, name: str, *, after: int | None = None) -> Verified:
        """End the agent, seal its files, judge them; again: once more over the same files.

        A verdict that no caller has got is kept and told to the next one instead.
        """
        await failpoints.at("sandbox.verify.before")
        box = self._find(key, name)
        box.ledger.check(after, name)
        if box.untold is None and (box.verification is None or box.verification.done()):
            if box.step and not box.step.done():
                raise Refused(
                    "a step of this box is running", field="box", value=name, way_out="wait for it"
                )
            box.ledger.closed = "its files are sealed for verification"
            box.verification = self._spawn(self._judge(name, box), f"verify-{name}")
        assert box.verification is not None
        done = known(await self._wait(key, name, box.verification))
        await failpoints.at("sandbox.verify.after")
        box.untold = None
        return done

    @counted
    async def release(self, key: EpisodeKey, name: str) -> bool:
        """End a box; False when it is not there (any more)."""
        await failpoints.at("sandbox.release.before")
        try:
            box = self._find(key, name)
        except NotFound:
            return False
        self._feed(pool.Released(name))
        await box.ended.wait()
        await failpoints.at("sandbox.release.after")
        return True

    def _hear(self, run: str, owner_epoch: int, event: pool.Event) -> None:
        """A call arrived: the pool hears of it. Raises Fenced for one of a former owner."""
        if self._stopped:
            raise stops()
        self._feed(event)
        fence = self._pool.fence(run, owner_epoch)
        if fence is not None:
            raise fence

    def _find(self, key: EpisodeKey, name: str) -> UsedBox:
        self._hear(key.run, key.owner_epoch, pool.Spoke(key, name))
        refusal = self._pool.refusal(key, name)
        if refusal is not None:
            raise refusal
        box = self._boxes[name]
        box.touched = True
        return box

    async def _wait(self, key: EpisodeKey, name: str, work: asyncio.Task[T]) -> T:
        try:
            return await self._waiting.for_(key, work)
        except NotFound:
            raise stops() if self._stopped else lost(_ENDED, name) from None

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
                    self._attempts.pop(ask.attempt, None)
                    ask.settle(pool.refused(command))
                case pool.TellFormer():
                    self._waiting.fence(self._pool.fence)
                case pool.EndBox(box, why):
                    self._spawn(self._end(box, why), f"end-{box}")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._feed(pool.Ticked())

    async def _start(self, ask: Ask, name: str) -> None:
        box = ask.box
        ask.name = name
        began = monotonic()
        try:
            with telemetry.span("box.start", box=name, task=box.task.name):
                await failpoints.at("sandbox.start.before")
                await self._backend.start(name, box.limits)
                self._boxes[name] = box
                await self._prepare(name, box)
        except (BoxFailure, MusterError) as failure:
            _log.warning("box %s did not start: %s", name, failure)
            self._forget(ask)
            self._boxes.pop(name, None)
            await self._end_backend(name)
            self._feed(pool.StartFailed(name))
            if isinstance(failure, BoxFailure):
                failure = pool.start_trouble(str(failure))
            ask.settle(failure)
            return
        box.acquired = Acquired(name, monotonic() - began, box.task.workdir)
        self._feed(pool.Started(name))
        if not ask.answer.done():
            ask.answer.set_result(box.acquired)

    def _forget(self, ask: Ask) -> None:
        if self._attempts.get(ask.attempt) is ask:
            del self._attempts[ask.attempt]

    async def _prepare(self, name: str, box: UsedBox) -> None:
        for action in environment.actions(box.task, box.files):
            match action:
                case environment.Put(files):
                    await self._backend.put(name, files)
                case environment.Enter(cwd, env):
                    await self._backend.set_session(name, cwd, env)
                case environment.RunSetup(command, shown):
                    timeout_s = self._config.setup_timeout_s
                    found = await self._backend.run(name, command, timeout_s)
                    said = (found.head + found.tail).decode("utf-8", "replace")
                    checks.setup(shown, found, telemetry.printable(said))

    async def _step(
        self, name: str, box: UsedBox, command: str, timeout_s: float
    ) -> StepRecord | MusterError:
        """Expected failures are returned: raised, they would end the whole host."""
        try:
            with telemetry.span("box.step", box=name):
                evidence = await self._backend.run(name, command, timeout_s)
            await failpoints.at("sandbox.keep.before")
        except (BoxFailure, Unavailable) as failure:
            if name not in self._boxes:
                return lost(_ENDED, name)
            _log.warning("box %s is lost with a step: %s", name, failure)
            box.ledger.lose(f"the result of a step was lost ({failure})")
            self._feed(pool.Released(name))  # it could take no other step
            return lost(f"the box is lost with the result of its step: {failure}")
        record = box.ledger.finish(evidence)
        try:
            await failpoints.at("sandbox.keep.after")
        except Unavailable as told:
            return told
        return record

    async def _judge(self, name: str, box: UsedBox) -> Verified | MusterError:
        spec = environment.judge_spec(box.task, box.files, box.limits)
        spec = environment.bounded(spec, self._config.verify_timeout_s_max)
        async with self._verifying:
            with telemetry.span("box.verify", box=name):
                try:
                    await self._backend.seal(name)
                    judged = await self._backend.judge(name, spec)
                except BoxFailure as failure:
                    _log.warning("box %s could not be judged: %s", name, failure)
                    return Unavailable(
                        f"the host could not judge: {failure}",
                        field="verifier",
                        way_out="ask again: the files are sealed and stay as they are",
                    )
        box.untold = Verified(verdict.read(judged), judged.evidence)
        return box.untold

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
        for ask in [ask for ask in self._attempts.values() if ask.box is box]:
            self._forget(ask)

    async def _end_backend(self, name: str) -> None:
        for _ in range(_ENDS_MAX):
            try:
                await self._backend.end(name)
                return
            except BoxFailure as failure:
                # After the last, the keeper's end or the sweep of the next start removes it.
                _log.error("box %s could not be ended: %s", name, failure)
