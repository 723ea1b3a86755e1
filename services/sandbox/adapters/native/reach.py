"""Finding the keeper of a runtime folder, or starting one, and telling it to stop.

Promise: only a keeper of our own user is spoken to; a service that is alive keeps its keeper, and
we are refused. Does not cover: what the keeper is asked (client.py).
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import services
from muster import telemetry
from muster.clock import monotonic
from muster.errors import HostUnfit
from services.sandbox.adapters.native import reception, release, wire

_log = telemetry.logger("muster.sandbox")
BEAT_S = reception.BEAT_S
_START = "from services.sandbox.adapters.native.keeper import main; import sys; "
_ANSWER_S = 10.0  # a keeper takes to answer a visitor
_BUSY_S = 6.0  # for a former service to be found gone
_BUSY_PAUSE_S = 0.1


class Process:
    """A keeper, ours or one that a former service started."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None):
        self.pid, self._child = pid, child
        self.handle = os.pidfd_open(pid)

    def ended(self) -> str:
        """How it ended; empty while it runs."""
        if not self.wait(0):
            return ""
        return f"it ended with status {self._child.returncode}" if self._child else "it has ended"

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        ended = bool(poll.poll(seconds * 1000))
        if ended and self._child:
            self._child.wait()
        return ended

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        except ProcessLookupError:
            return  # it has ended by itself

    def close(self) -> None:
        os.close(self.handle)


@dataclass
class Found:
    """A keeper and our connection to it; `first`: its greeting, when that has come already."""

    process: Process
    end: socket.socket
    first: dict[str, Any] | None = None


def start(runtime_dir: Path, instance: str, orphan_s: float) -> Found:
    """A new one, as a child of ours."""
    own, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    root = Path(services.__file__).resolve().parent.parent
    call = f"main({str(runtime_dir)!r}, {instance!r}, {theirs.fileno()}, {orphan_s!r})"
    code = f"import sys; sys.path.insert(0, {str(root)!r}); {_START}{call}"
    # -I -S: no site-packages, nothing from the environment; it starts in about 30 ms.
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        process_group=0,
        cwd="/",
        env={},
    )
    theirs.close()
    return Found(Process(child.pid, child), own)


async def take_over(runtime_dir: Path, orphan_s: float) -> Found | None:
    """The one that a former service left; None when there is none. Raises HostUnfit.

    One of another release is told to stop, and its boxes end: we do not share its words.
    """
    deadline = monotonic() + _BUSY_S
    while True:
        found = await asyncio.to_thread(_visit, runtime_dir, orphan_s)
        if found is None or found.first is None:
            return found
        if found.first.get("release") == release.digest():
            return found
        found.end.close()
        if not found.first.get("busy"):
            await asyncio.to_thread(_dismiss, runtime_dir, found)
            return None
        found.process.close()
        if monotonic() > deadline:
            raise HostUnfit(
                f"another sandbox host uses {runtime_dir}",
                field="sandbox.runtime_dir",
                value=runtime_dir,
                way_out="stop it, or give this one another sandbox.runtime_dir",
            )
        await asyncio.sleep(_BUSY_PAUSE_S)


def _visit(runtime_dir: Path, orphan_s: float) -> Found | None:
    end = _connected(runtime_dir, _ANSWER_S)
    if end is None:
        return None
    process = None
    try:
        process = Process(reception.peer(end)[0], None)
        hello = wire.encode({"op": "adopt", "orphan_s": orphan_s})
        socket.send_fds(end, [hello], [2])  # our stderr, for its messages; so short goes whole
        return Found(process, end, wire.receive(end)[0])
    except (OSError, EOFError, wire.ProtocolError):
        end.close()
        if process:
            process.close()
        return None  # it ends, or hangs: the lock says whether another can be started


def _dismiss(runtime_dir: Path, found: Found) -> None:
    _log.warning("the boxes of a former service of another release end")
    _say_stop(runtime_dir, str((found.first or {}).get("epoch")), _ANSWER_S)
    found.process.wait(_ANSWER_S)
    found.process.close()


async def say_stop(runtime_dir: Path, epoch: str, wait_s: float) -> bool:
    """Tell the keeper that its service stops; False when it works for another one now.

    It hears of it even if it is busy for longer than we wait for its answer.
    """
    return await asyncio.to_thread(_say_stop, runtime_dir, epoch, wait_s)


def _say_stop(runtime_dir: Path, epoch: str, wait_s: float) -> bool:
    end = _connected(runtime_dir, wait_s)
    if end is None:
        return True
    try:
        wire.send(end, {"op": "stop", "epoch": epoch})
        return bool(wire.receive(end)[0]["ok"])
    except (OSError, EOFError, wire.ProtocolError):
        return True  # it ends already
    finally:
        end.close()


def _connected(runtime_dir: Path, wait_s: float) -> socket.socket | None:
    """A connection to the keeper of this folder, if there is one."""
    try:
        folder = os.open(runtime_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(wait_s)
    try:
        end.connect(f"/proc/self/fd/{folder}/{reception.NAME}")
        if reception.peer(end)[1] == os.geteuid():
            return end
    except OSError:
        pass  # none, or none that listens
    finally:
        os.close(folder)
    end.close()
    return None
