"""Runs the services of one machine as processes: start, watch, restart, stop, leave nothing.

Owns: the loop around supervise/machine.py and the signals. Promise: the first SIGINT, SIGTERM or
SIGHUP stops all in order, within 10 s whatever they are doing; a second one kills at once.
Does not cover: what must be true before a start (supervise/prepare.py), showing progress (CLI).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence

from muster.clock import monotonic
from muster.config import Config
from muster.registry import Entry
from muster.supervise import machine
from muster.supervise.health import Health
from muster.supervise.plan import STANDBYS, Service, environment
from muster.supervise.processes import Processes
from muster.supervise.state import Claim, write_router_address
from muster.supervise.troubles import Troubles
from muster.tasks import end
from muster.types import Value

_TICK_S = 0.1
_LEADER_S = 0.5
_LOG_CHECK_S = 10.0

Show = Callable[[machine.Report], None]
Work = Callable[[], Awaitable[None]]


class Ended(Value, frozen=True):
    """How a run ended: `line` is a message for people when nobody asked for the end."""

    status: int
    line: str
    interrupted: bool


class Supervisor:
    """One run of a plan under a claim. `config` is the resolved one."""

    def __init__(
        self,
        config: Config,
        claim: Claim,
        services: Sequence[Service],
        *,
        show: Show,
        rules: machine.Rules | None = None,
    ):
        self._show, self._services = show, {service.name: service for service in services}
        self._machine = machine.SupervisorMachine(
            rules or machine.Rules(tuple(service.rule for service in services))
        )
        self._health = Health(config.redis.url, config.run)
        self._processes = Processes(claim, environment(os.environ, claim.runtime))
        self._claim, self._troubles = claim, Troubles()
        self._phases: dict[str, str] = {}
        # Bounded by what a handful of services can do between two turns of the loop.
        self._inbox: asyncio.Queue[machine.Event] = asyncio.Queue(1000)
        self._ready = asyncio.Event()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._finish: machine.Finish | None = None
        self._interrupted = False
        self._work: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def run(self, work: Work | None = None) -> Ended:
        """Until asked to stop, or until `work` is done, which starts when all are ready.

        An exception of `work` is raised again when everything has stopped.
        """
        numbers = self._take_signals()
        try:
            async with self._health, asyncio.TaskGroup() as tasks:
                timers = [
                    tasks.create_task(self._ticks(), name="supervisor-ticks"),
                    tasks.create_task(self._look_at_logs(), name="supervisor-logs"),
                    tasks.create_task(self._follow_leaders(), name="supervisor-leaders"),
                ]
                if work:
                    self._work = tasks.create_task(self._run_work(work), name="supervisor-work")
                finish = await self._loop(tasks)
                await end(*timers, *self._watches.values())
                self._cancel_work()
        finally:
            for number in numbers:
                asyncio.get_running_loop().remove_signal_handler(number)
        if self._failure and not self._interrupted and not finish.line:
            raise self._failure
        return Ended(finish.status, finish.line, self._interrupted)

    async def _loop(self, tasks: asyncio.TaskGroup) -> machine.Finish:
        while True:
            event = await self._inbox.get()
            for command in self._machine.handle(event, monotonic()):
                if isinstance(command, machine.Finish):
                    return command
                await self._execute(command, tasks)

    async def _execute(self, command: machine.Command, tasks: asyncio.TaskGroup) -> None:
        match command:
            case machine.Start(name):
                try:
                    await self._processes.start(self._services[name])
                except OSError as error:  # a full disk, no descriptors
                    line = f"it could not be started: {error}"
                    self._inbox.put_nowait(machine.NotStarted(name, line))
                    return
                self._troubles.started(name, self._processes.log(name))
                self._watches[name] = tasks.create_task(self._watch(name), name=f"watch-{name}")
            case machine.Terminate(name):
                self._cancel_work()
                self._processes.terminate(name)
            case machine.Kill(name):
                self._cancel_work()
                tasks.create_task(self._processes.end(name), name=f"kill-{name}")
            case machine.Report():
                self._phases[command.service] = command.phase
                self._show(command)
            case machine.AllReady():
                self._ready.set()
            case machine.Finish():
                raise AssertionError("the loop ends there")

    async def _watch(self, name: str) -> None:
        """Feed `Healthy` once, then `Exited`."""
        service, pid = self._services[name], self._processes.pid(name)
        async with asyncio.TaskGroup() as tasks:
            probe = tasks.create_task(self._probe(service, pid), name=f"probe-{name}")
            status, line = await self._processes.ended(name)
            await end(probe)
        await self._inbox.put(machine.Exited(name, status, line))
        if service.kind in STANDBYS and pid is not None:
            await self._health.buried(service.kind, pid)

    async def _probe(self, service: Service, pid: int | None) -> None:
        remark = await self._health.ready(service, pid)
        remark = remark or self._processes.remark(service.name)
        await self._inbox.put(machine.Healthy(service.name, remark))

    async def _follow_leaders(self) -> None:
        """Write down where the router listens, and tell when another process took a role over."""
        known: dict[str, Entry] = {}
        while True:
            for role in STANDBYS:
                entry = await self._health.leader(role)
                if entry is None or entry.id == (known[role].id if role in known else ""):
                    continue
                if role == "router" and not self._written_down(entry.address):
                    continue
                by_pid = {self._processes.pid(name): name for name in self._services}
                if role in known and entry.pid in by_pid and entry.pid != known[role].pid:
                    detail = f"leads now, at {entry.address}"
                    self._show(machine.Report(by_pid[entry.pid], machine.Phase.READY, detail))
                known[role] = entry
            await asyncio.sleep(_LEADER_S)

    def _written_down(self, address: str) -> bool:
        """Where the router listens; not on a full disk, and then it is tried again."""
        try:
            write_router_address(self._claim.state_dir, address)
        except OSError:
            return False
        return True

    async def _run_work(self, work: Work) -> None:
        await self._ready.wait()
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - raised again once all have stopped
            self._failure = error
        await self._inbox.put(machine.StopAsked())

    def _cancel_work(self) -> None:
        if self._work:
            self._work.cancel()

    async def _ticks(self) -> None:
        while True:
            await self._inbox.put(machine.Tick())
            await asyncio.sleep(_TICK_S)

    async def _look_at_logs(self) -> None:
        """Bound them, and tell what services that are ready say they are held up by."""
        while True:
            await asyncio.sleep(_LOG_CHECK_S)
            for name in [n for n, phase in self._phases.items() if phase == machine.Phase.READY]:
                told = self._troubles.look(name, self._processes.log(name))
                if told is not None:
                    detail = f"waits: {told}" if told else "goes on"
                    self._show(machine.Report(name, machine.Phase.READY, detail))
            self._processes.bound_logs()

    def _take_signals(self) -> list[signal.Signals]:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup keeps it ignored
            numbers.append(signal.SIGHUP)
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        return numbers

    def _on_signal(self) -> None:
        self._interrupted = True
        self._inbox.put_nowait(machine.StopAsked())
