"""A small parent for one service, so that nothing of it outlives the supervisor.

Run by path with `python -I -S`, standard library only: it must start in milliseconds.

    guard.py SUPERVISOR_PID REPORT_FD COMMAND [ARGUMENT...]

Owns: one service process and everything that descends from it (the guard is their subreaper, so
orphans come to it). Promise: when the supervisor dies, however it dies, the kernel sends SIGHUP
here and all descendants get SIGKILL; when the service ends, what it left behind gets SIGKILL; when
the guard itself is killed, the service is too. SIGTERM is passed on to the service. Neither has a
terminal, else one that asks it for something would be stopped for ever. Exits with the service's
status, 128 + n after signal n. Does not cover: files, mounts, cgroups (their owners do).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import termios
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = {signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_END_S = 5.0  # longest wait for killed descendants to be gone


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _descendants(root: int) -> list[int]:
    """All below `root` that live. What is dead may still hold children, until its threads are."""
    children: dict[int, list[int]] = {}
    dead = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it ended while we looked
            if fields[0] == b"Z":
                dead.add(int(name))
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    reach = [root]
    while reach:
        below = children.get(reach.pop(), [])
        found += below
        reach += below
    return [pid for pid in found if pid not in dead]


def _end_all() -> None:
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        alive = _descendants(os.getpid())
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap(0)
        if not alive:
            return
        time.sleep(0.005)


def _reap(service: int) -> int | None:
    """Collect every dead child; the exit status of `service` when it was among them."""
    status = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == service:
            status = os.waitstatus_to_exitcode(code)


def _leave_terminal() -> None:
    """Have none any more, in the same session. (muster/isolate.py has it, too: no import here.)"""
    with contextlib.suppress(OSError):  # there is none
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        with contextlib.closing(os.fdopen(terminal, "rb", buffering=0)):
            fcntl.ioctl(terminal, termios.TIOCNOTTY)


def _exec(guard: int, command: list[str]) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)  # the guard died before the line above took hold
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(127)


def main(arguments: list[str]) -> int:
    supervisor, report, command = int(arguments[0]), int(arguments[1]), arguments[2:]
    # Blocked and waited for, never handled: no signal can come at a wrong moment.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != supervisor:
        return 1
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _leave_terminal()
    guard = os.getpid()
    service = os.fork()
    if service == 0:
        os.close(report)
        _exec(guard, command)
    os.write(report, b"%d\n" % service)
    os.close(report)
    while True:
        number = signal.sigwait(_SIGNALS)
        status = _reap(service)
        if status is not None:
            _end_all()
            return status if status >= 0 else 128 - status
        if number == signal.SIGHUP:
            _end_all()
            return 128 + signal.SIGKILL
        if number == signal.SIGTERM:
            os.kill(service, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
