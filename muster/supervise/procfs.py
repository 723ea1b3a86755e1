"""Who a process is, read from /proc: a pid alone is not an identity, it is reused."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from muster.types import Value


class Identity(Value, frozen=True):
    """A process for good: `start_ticks` is field 22 of /proc/PID/stat (clock ticks since boot)."""

    pid: int
    start_ticks: int


def identify(pid: int) -> Identity | None:
    """The identity of a live process, None when there is none (a zombie counts as none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else Identity(pid, int(fields[19]))


def alive(who: Identity) -> bool:
    """True while exactly this process lives."""
    return identify(who.pid) == who


def group_of(pid: int) -> int | None:
    """Process group of a live process."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def descendants(roots: Iterable[int]) -> list[Identity]:
    """Live processes below these, whatever group, session or environment they gave themselves."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended while we looked
        children.setdefault(int(fields[1]), []).append(pid)  # the dead may hold some, too
    found, reach = set[int](), list(roots)
    while reach:
        below = [pid for pid in children.get(reach.pop(), ()) if pid not in found]
        found.update(below)
        reach += below
    return [who for who in map(identify, sorted(found)) if who]


def pids() -> list[int]:
    """All processes that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def with_environment(entry: bytes) -> list[Identity]:
    """Live processes that were started with the environment entry `NAME=value`."""
    found = []
    for pid in pids():
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended, or of another user
        who = identify(pid)
        if who and entry in entries and pid != os.getpid():
            found.append(who)
    return found


def kill_and_wait(processes: Iterable[Identity], timeout_s: float) -> list[Identity]:
    """SIGKILL each, wait until they are gone; those that are still there after `timeout_s`."""
    left = [who for who in processes if alive(who)]
    for who in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(who.pid, signal.SIGKILL)
    return wait_gone(left, timeout_s)


def wait_gone(processes: Iterable[Identity], timeout_s: float) -> list[Identity]:
    """Wait until all have ended; those that have not after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left = [who for who in processes if alive(who)]
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [who for who in left if alive(who)]
    return left
