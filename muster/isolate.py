"""Let a process and everything it starts be ended as one, whatever ends it.

Owns: `enter`, to be called first thing in a service that starts processes of its own (before any
thread, and before heavy imports), and `leave`, its last act. Guaranteed:

as root  the service runs as process 1 of a PID namespace with its own /proc and /dev/shm. When it
         ends, or is killed, or its starter is, the kernel kills all processes in there and frees
         their shared memory; no file of it was ever visible outside.
else     the service runs in a process group of its own; when it ends, however it ends, the group is
         killed. If the starter is killed with SIGKILL the service dies too, but grandchildren that
         it had started may be left; its shared memory may be left as well.

In both cases it has no terminal. The caller of `enter` goes on only in the child. The starter stays
outside, passes SIGTERM and SIGINT on, and exits with the child's status (128 + n after signal n).
Does not cover: limits, networks, file systems other than those two (services/sandbox does boxes).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import sys
import tempfile
import termios
from collections.abc import Callable
from functools import partial
from typing import NoReturn

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_MS_NOSUID_NODEV = 2 | 4
_MS_NOSUID_NODEV_NOEXEC = _MS_NOSUID_NODEV | 8
_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGTERM, signal.SIGINT)
_SWEEPS = 100
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter(*, shm_bytes: int = 8 << 30) -> bool:
    """Go on inside. True when the kernel guarantees the end of everything, else False."""
    strong = os.geteuid() == 0 and _LIBC.unshare(_CLONE_NEWPID) == 0
    alive, held = os.pipe()  # the starter holds an end as long as it lives
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child:
        os.close(alive)
        os._exit(_wait(child, strong))
    os.close(held)
    _die_with_starter(alive)
    os.setpgid(0, 0)
    leave_terminal()
    # Process 1 of a namespace ignores signals that have no handler: give it one from the start.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    if strong:
        _own_mounts(shm_bytes)
    return strong


def leave(status: int) -> NoReturn:
    """End this process at once, after all that it has started, whatever their threads are doing.

    The interpreter's own exit waits for children, and may be aborted by a library's threads.
    """
    killed: set[int] = set()
    for _ in range(_SWEEPS):  # until none is new: one may have started another meanwhile
        found = _descendants() - killed
        if not found:
            break
        killed |= found
        for pid in found:
            _quietly(partial(os.kill, pid, signal.SIGKILL))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def leave_terminal() -> None:
    """Have none any more, in the same session: whoever asks it for something in the background is
    stopped for ever. No leader of a session may call it, for that would end the session's."""
    with contextlib.suppress(OSError):  # there is none
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        with contextlib.closing(os.fdopen(terminal, "rb", buffering=0)):
            fcntl.ioctl(terminal, termios.TIOCNOTTY)


def _descendants() -> set[int]:
    """Every living process below this one, as /proc tells it. What is dead may still hold children,
    until its threads are, too."""
    children: dict[int, list[int]] = {}
    dead = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # ended meanwhile
        if state == "Z":
            dead.add(int(name))
        children.setdefault(int(parent), []).append(int(name))
    found = [os.getpid()]
    for pid in found:  # grows while it is read
        found += children.get(pid, [])
    return set(found[1:]) - dead


def _wait(child: int, strong: bool) -> int:
    """The starter's whole life from here on; returns the exit status."""

    def pass_on(number: int, frame: object) -> None:
        del frame
        _quietly(lambda: os.kill(child, number))

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    _, status = os.waitpid(child, 0)  # resumes by itself after a signal
    if not strong:
        _quietly(lambda: os.killpg(child, signal.SIGKILL))
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _die_with_starter(alive: int) -> None:
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    # It may have died before that call; inside a namespace getppid() does not tell.
    watch = select.poll()
    watch.register(alive, select.POLLIN)
    if watch.poll(0):
        os._exit(128 + signal.SIGKILL)
    os.close(alive)


def _own_mounts(shm_bytes: int) -> None:
    _check(_LIBC.unshare(_CLONE_NEWNS), "unshare")
    _mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
    _mount(b"proc", b"/proc", b"proc", _MS_NOSUID_NODEV_NOEXEC, None)
    options = f"mode=1777,size={shm_bytes}".encode()
    # Executable: the engine maps what its compiler writes into the temporary folder.
    _mount(b"tmpfs", b"/dev/shm", b"tmpfs", _MS_NOSUID_NODEV, options)
    # Temporary files of the service's libraries go there too, and with it.
    private = "/dev/shm/tmp"
    os.mkdir(private, 0o700)
    os.environ["TMPDIR"] = private
    tempfile.tempdir = None


def _mount(
    source: bytes, target: bytes, kind: bytes | None, flags: int, data: bytes | None
) -> None:
    _check(_LIBC.mount(source, target, kind, flags, data), f"mount {target.decode()}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _quietly(act: Callable[[], None]) -> None:
    """The process may be gone already."""
    try:
        act()
    except ProcessLookupError:
        pass
