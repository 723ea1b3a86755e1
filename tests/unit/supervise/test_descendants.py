"""Who descends from a process is found, whatever it and they did to be forgotten."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from muster import isolate
from muster.supervise import guard, procfs

# Its child has a session of its own and no environment. It then ends its main thread alone: dead
# to whoever looks at its state, it still is the parent until its other threads have ended.
HALF_DEAD = """
import ctypes, subprocess, threading, time
child = subprocess.Popen(["/usr/bin/sleep", "600"], start_new_session=True, env={})
print(child.pid, flush=True)
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall(60, 0)
"""
_DEADLINE_S = 20


@pytest.fixture
def half_dead() -> Iterator[tuple[int, int]]:
    """A process whose main thread has ended, and its child."""
    process = subprocess.Popen([sys.executable, "-c", HALF_DEAD], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    while procfs.identify(process.pid) is not None:  # until it looks dead; it cannot end by itself
        os.sched_yield()
    yield process.pid, child
    for pid in (child, process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(_DEADLINE_S)
    process.stdout.close()


def of_the_supervisor() -> set[int]:
    return {who.pid for who in procfs.descendants([os.getpid()])}


def of_the_guard() -> set[int]:
    return set(guard._descendants(os.getpid()))


@pytest.mark.parametrize("found", [of_the_supervisor, of_the_guard, isolate._descendants])
def test_a_child_of_one_whose_main_thread_has_ended_is_found(
    found: Callable[[], set[int]], half_dead: tuple[int, int]
) -> None:
    parent, child = half_dead
    assert child in found()
    assert parent not in found(), "whoever waits until nobody is alive would wait for ever"
