"""Runs the steps of a box, for its PID 1: one at a time, each under its own time limit.

Owns: the box's session (working directory, exported environment), the processes of each step and
their output. Promise: a step has ended when its shell exits, not when its output is closed; output
is drained for ever and kept within bounds; at the time limit the whole tree of the step is killed
through its own cgroup and the session goes on. Waits for nothing but a kill: `outputs`, `wake` and
`pause` say what to poll for. Standard library only, one thread.
Does not trust: anything an agent's process wrote; the state file is read as data, bounded.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from dataclasses import dataclass, field
from typing import Any

from services.sandbox.adapters.native import blame, pressure
from services.sandbox.adapters.native.confine import BASH, Rules, Shell, become
from services.sandbox.adapters.native.spool import Spool
from services.sandbox.adapters.shell_state import NOT_CARRIED, STATE_MAX, WRAPPER

Answer = tuple[dict[str, Any], bytes]

_CHUNK = 1 << 18
_KILL_WAIT_S = 5.0
_LEAK_PAUSE_S = 0.01


@dataclass
class Doors:
    """Descriptors opened before the old root went away."""

    control: socket.socket  # to the service; a successor's comes through `keeper`
    keeper: socket.socket  # open for as long as the keeper lives
    group: int  # v2 directory whose children are the steps' leaves
    joins: list[int]  # v1 cgroup.procs files
    oom: int
    pids: int
    disk: int  # directory of the tmpfs that holds the upper layer
    state: int  # directory /run/muster
    null: int
    throttle: int = -1  # cpu.stat of the group with the processor limit, if the box has one


@dataclass
class _Running:
    """One step in flight."""

    pid: int
    leaf: str
    out: int
    spool: Spool
    began: float
    deadline: float
    oom_before: int
    pids_before: int
    cpu_before: float
    held_before: float
    status: int | None = None
    timed_out: bool = False


@dataclass
class Session:
    """What one step leaves to the next."""

    cwd: str = "/"
    env: dict[str, str] = field(default_factory=dict)

    def packed(self) -> bytes:
        """As the state file has it, which may be more than fits into a frame's header."""
        pairs = (f"{name}={value}" for name, value in self.env.items())
        return os.fsencode("\0".join((self.cwd, *pairs)))

    @staticmethod
    def unpacked(data: bytes) -> Session:
        """The reverse, for the state file as well: data, never code."""
        cwd, *pairs = os.fsdecode(data).split("\0")
        return Session(cwd, dict(pair.split("=", 1) for pair in pairs if "=" in pair))


class Steps:
    """Of one box."""

    def __init__(self, doors: Doors, rules: Rules):
        self._doors, self._rules = doors, rules
        self.session = Session()
        self.wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._leaking: set[int] = set()  # outputs that background processes still hold
        self._leaks_from = 0.0  # when they are to be drained next
        self._leaves: list[str] = []
        self._launched = 0
        self._step: _Running | None = None

    @property
    def running(self) -> bool:
        return self._step is not None

    @property
    def left_s(self) -> float:
        """Until the time limit of the step that runs; 0 without one."""
        return max(0.0, self._step.deadline - time.monotonic()) if self._step else 0.0

    def outputs(self) -> set[int]:
        """Descriptors to read from once they are readable (`drain`)."""
        step = self._step
        leaks = self._leaking if time.monotonic() >= self._leaks_from else set()
        return leaks | ({step.out} if step and step.out >= 0 else set())

    def pause(self) -> float | None:
        """Seconds until something is to be done though nothing happens; None: never."""
        waits = []
        if self._step:
            waits.append(max(0.01, self._step.deadline - time.monotonic()))
        if self._leaking:
            waits.append(max(0.0, self._leaks_from - time.monotonic()))
        return min(waits) if waits else None

    def begin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start a step; empty, or the answer that says why it did not start."""
        try:
            os.unlink("state", dir_fd=self._doors.state)
        except OSError:
            pass  # absent, or a folder that the agent made: then nothing is carried over
        return self._launch(request)

    def result(self) -> Answer | None:
        """The answer of the step once it has ended; at its time limit it is ended here."""
        step = self._step
        if step is None:
            return None
        left = step.deadline - time.monotonic()
        if step.status is None and left <= 0:
            if not step.timed_out:
                step.timed_out = True
                if not self._kill_step(step):
                    return self._given_up(step, "processes of the step did not end in time")
            elif left <= -_KILL_WAIT_S:
                return self._given_up(step, "the step's shell did not end in time")
        if step.status is None:
            return None
        wall = time.monotonic() - step.began
        self._drain_rest(step)
        if not step.timed_out:
            self._read_state()
        self._step = None
        self._leaves.append(step.leaf)
        answer = self._evidence(step, wall)
        self._leaves = [leaf for leaf in self._leaves if not self._remove_leaf(leaf)]
        return answer, step.spool.head + step.spool.tail

    def _given_up(self, step: _Running, why: str) -> Answer:
        self._step = None
        self._leaves.append(step.leaf)
        if step.out >= 0:
            self._leaking.add(step.out)
        return {"error": why}, b""

    def _evidence(self, step: _Running, wall: float) -> dict[str, Any]:
        status = step.status or 0
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        disk = os.fstatvfs(self._doors.disk)
        stalls = pressure.stalls(lambda name: self._open_in_leaf(step.leaf, name, os.O_RDONLY))
        return {
            "exit_code": 128 + number if number else os.WEXITSTATUS(status),
            "signal": number,
            "timed_out": step.timed_out,
            "oom_kills": self._count(self._doors.oom, "oom_kill") - step.oom_before,
            "pids_refused": self._count(self._doors.pids, "max") - step.pids_before,
            "disk_full": disk.f_bavail == 0 or disk.f_favail == 0,
            "wall_s": wall,
            "cpu_s": max(0.0, self._cpu() - step.cpu_before),
            "total": step.spool.total,
            "head": len(step.spool.head),
        } | pressure.without(stalls, self._held_back() - step.held_before)

    def _launch(self, request: dict[str, Any]) -> dict[str, Any]:
        """Fork the step's shell; empty, or the answer that says why there is none."""
        self._launched += 1
        leaf = f"t{self._launched}"
        os.mkdir(leaf, dir_fd=self._doors.group)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        failed_read, failed_write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(out_read, False)
        oom, pids = self._count(self._doors.oom, "oom_kill"), self._count(self._doors.pids, "max")
        began = time.monotonic()
        cpu = self._cpu()
        pid = os.fork()
        if pid == 0:
            become(self._shell(request, leaf, out_write, failed_write), self._rules)
        os.close(out_write)
        os.close(failed_write)
        failure = os.read(failed_read, 500)
        os.close(failed_read)
        if failure:
            os.waitpid(pid, 0)
            os.close(out_read)
            self._remove_leaf(leaf)
            return self._blame(failure, oom, pids)
        self._step = _Running(
            pid, leaf, out_read, Spool(int(request["output_bytes"])), began,
            began + float(request["timeout_s"]), oom, pids, cpu, self._held_back(),
        )  # fmt: skip
        return {}

    def _blame(self, failure: bytes, oom_before: int, pids_before: int) -> dict[str, Any]:
        """A shell that did not start: `broken` when that is the agent's doing, else `error`."""
        stage, number, text = blame.read(failure)
        oom = self._count(self._doors.oom, "oom_kill") - oom_before
        pids = self._count(self._doors.pids, "max") - pids_before
        there = os.access(BASH, os.X_OK)
        if blame.by_agent(stage, number, shell_there=there, limit_struck=oom + pids > 0):
            return {"broken": text, "oom_kills": oom, "pids_refused": pids}
        return {"error": text}

    def _shell(self, request: dict[str, Any], leaf: str, out: int, failed: int) -> Shell:
        script = request.get("script")
        last = [script] if script else ["-c", WRAPPER, "bash", request["command"]]
        doors = self._doors
        return Shell(
            ["bash", "--noprofile", "--norc", *last], self.session.env, [self.session.cwd],
            leaf, doors.group, doors.joins, doors.null, out, failed,
        )  # fmt: skip

    def drain(self, ready: set[int]) -> None:
        """Read what is there from these descriptors; others among them are not ours."""
        step = self._step
        if step and step.out in ready:
            data = os.read(step.out, _CHUNK)
            if data:
                step.spool.add(data)
            else:
                os.close(step.out)
                step.out = -1
        for handle in self._leaking & ready:
            # Nobody reads it any more, but its writers must neither block for good nor die of
            # SIGPIPE. In between they rest, so that a loop that prints costs no processor.
            self._leaks_from = time.monotonic() + _LEAK_PAUSE_S
            if not os.read(handle, _CHUNK):
                os.close(handle)
                self._leaking.discard(handle)

    def _drain_rest(self, step: _Running) -> None:
        """What lies in the pipe now; background processes may keep it open."""
        for _ in range(64):
            if step.out < 0:
                return
            try:
                data = os.read(step.out, _CHUNK)
            except BlockingIOError:
                self._leaking.add(step.out)
                return
            if not data:
                os.close(step.out)
                return
            step.spool.add(data)
        self._leaking.add(step.out)

    def reap(self) -> None:
        """Collect every process that has ended."""
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._step and pid == self._step.pid:
                self._step.status = status

    def _kill_step(self, step: _Running) -> bool:
        """End every process of the step; False when some would not end."""
        if not self._rules.kill_tree:
            os.kill(step.pid, signal.SIGKILL)
            return True
        with open(self._open_in_leaf(step.leaf, "cgroup.kill", os.O_WRONLY), "w") as file:
            file.write("1")
        deadline = time.monotonic() + _KILL_WAIT_S
        while time.monotonic() < deadline:
            self.reap()
            with open(self._open_in_leaf(step.leaf, "cgroup.events", os.O_RDONLY)) as file:
                if "populated 0" in file.read():
                    return True
            time.sleep(0.001)
        return False

    def _open_in_leaf(self, leaf: str, name: str, flags: int) -> int:
        return os.open(f"{leaf}/{name}", flags | os.O_CLOEXEC, dir_fd=self._doors.group)

    def _remove_leaf(self, leaf: str) -> bool:
        try:
            os.rmdir(leaf, dir_fd=self._doors.group)
        except OSError:
            return False  # background processes live in it
        return True

    def _cpu(self) -> float:
        """Processor time that the box's agent has used so far, in seconds.

        Of the whole box: else processes that an earlier step left running could take the processor
        from a step, and the host would seem to have starved it.
        """
        try:
            with open(self._open_in_leaf(".", "cpu.stat", os.O_RDONLY)) as file:
                return int(file.readline().split()[1]) / 1e6
        except (OSError, ValueError, IndexError):
            return os.times().children_user + os.times().children_system

    def _held_back(self) -> float:
        """How long the box's processor limit has held its processes back so far, in seconds."""
        if self._doors.throttle < 0:
            return 0.0
        try:
            return pressure.throttled(os.pread(self._doors.throttle, 4096, 0).decode())
        except (OSError, ValueError):
            return 0.0

    @staticmethod
    def _count(handle: int, name: str) -> int:
        for line in os.pread(handle, 4096, 0).decode().splitlines():
            words = line.split()
            if words[0] == name:
                return int(words[1])
        return 0

    def _read_state(self) -> None:
        """Take over folder and environment if the shell left them; it is data, never code."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            handle = os.open("state", flags, dir_fd=self._doors.state)
        except OSError:
            return
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return
            data = os.read(handle, STATE_MAX + 1)
        finally:
            os.close(handle)
        if len(data) > STATE_MAX or not data.endswith(b"\0"):
            return
        left = Session.unpacked(data[:-1])
        self.session = Session(
            left.cwd if left.cwd.startswith("/") else self.session.cwd,
            # Nothing at all: `env` itself did not start, for a variable over 128 KiB.
            {k: v for k, v in left.env.items() if k and k not in NOT_CARRIED} or self.session.env,
        )
