"""Starts and ends the processes of services, each under its guard, each with its log.

Owns: guards, log files, the record of both in supervisor.json. Promise: a process is recorded
before anything waits for it; `end` is bounded; every service has a process group of its own in the
session of the supervisor (docs/adr/0020-one-session.md). Does not cover: when (machine.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from muster.supervise import logs, server_log
from muster.supervise.plan import REDIS, Service
from muster.supervise.procfs import identify
from muster.supervise.state import Child, Claim

_GUARD = str(Path(__file__).with_name("guard.py"))
_GUARD_KILL_S = 1.5  # a guard that has not ended its service by then is killed with its group
_LOG_BYTES_MAX = 16 << 20


class Processes:
    """The processes of one claim, by service name."""

    def __init__(self, claim: Claim, environment: Mapping[str, str]):
        self._claim, self._environment = claim, environment
        self._guards: dict[str, asyncio.subprocess.Process] = {}
        self._log_starts: dict[str, int] = {}
        self._commands: dict[str, tuple[str, ...]] = {}
        self._logs = claim.state_dir / "logs"
        self._logs.mkdir(exist_ok=True)

    def log(self, name: str) -> Path:
        """Where a service's output goes."""
        return self._logs / f"{name}.log"

    async def start(self, service: Service) -> None:
        """Start it and record it. Raises OSError, leaving nothing, when either cannot be done."""
        name, path = service.name, self.log(service.name)
        before = self._claim.children.get(name)
        logs.rotate(path, _LOG_BYTES_MAX if before else 0)
        reading, writing = os.pipe()
        try:
            with path.open("ab") as log:
                self._log_starts[name] = log.tell()
                guard = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", _GUARD, str(os.getpid()), str(writing)),
                    *service.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(self._environment),
                    process_group=0,
                    pass_fds=(writing,),
                )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._guards[name], self._commands[name] = guard, service.command
        # Ends at once when the guard dies, since it holds the only other end.
        told = await asyncio.to_thread(os.read, reading, 32)
        os.close(reading)
        process = identify(int(told)) if told.strip() else None
        starts = before.starts + 1 if before else 1
        self._claim.children[name] = Child(identify(guard.pid), process, starts)
        try:
            self._claim.write()
        except OSError:
            await self.end(name)
            del self._claim.children[name]
            raise

    async def ended(self, name: str) -> tuple[int, str]:
        """Wait for the end: exit status (128 + n after signal n) and its last words."""
        status = await self._guards[name].wait()
        status = status if status >= 0 else 128 - status
        log, start = self.log(name), self._log_starts[name]
        if name == REDIS and status:
            data, server = self._claim.state_dir / "redis", self._commands[name][0]
            if line := server_log.verdict(log, start, data=data, server=server):
                return 2, line
        return status, logs.last_words(log, start, status)

    def remark(self, name: str) -> str:
        """What people should know of a start that went well."""
        if name != REDIS:
            return ""
        return server_log.remark(self.log(name), self._log_starts[name])

    def pid(self, name: str) -> int | None:
        """Of the service's process, None when it never came to be."""
        child = self._claim.children.get(name)
        return child.process.pid if child and child.process else None

    def terminate(self, name: str) -> None:
        """Ask it to stop, if it was ever started; the guard passes it on."""
        if name not in self._guards:
            return
        with contextlib.suppress(ProcessLookupError):
            self._guards[name].send_signal(signal.SIGTERM)

    async def end(self, name: str) -> None:
        """Kill it with all that descends from it, if it was ever started."""
        if name not in self._guards:
            return
        guard = self._guards[name]
        with contextlib.suppress(ProcessLookupError):
            guard.send_signal(signal.SIGHUP)
        try:
            async with asyncio.timeout(_GUARD_KILL_S):
                await guard.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guard.pid, signal.SIGKILL)

    def bound_logs(self) -> None:
        """Keep every log under its limit."""
        for name in self._guards:
            logs.rotate(self.log(name), _LOG_BYTES_MAX)
