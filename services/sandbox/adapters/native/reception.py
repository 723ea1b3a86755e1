"""Who the keeper works for: one service at a time, and none for a while when that one is gone.

Owns: the socket in the runtime folder and the present service's connection. Promise: a connection
of another user is closed unheard; a service that is alive keeps the keeper, and another one is told
so; one that is gone, or silent for longer than it may be, loses it to the next and is never heard
again; a service that stops half way through a frame holds up the keeper for a few seconds at most.
Does not cover: what is asked (keeper.py). Standard library only.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from services.sandbox.adapters.native import wire

NAME = "keeper.sock"
BEAT_S = 1.0  # a living service is heard of so often
_SILENT_S = 4.0  # one that is not, for so long, has no claim any more
_FRAME_S = 5.0  # between two parts of one frame
_CREDENTIALS = struct.Struct("3i")


class What(Enum):
    """What the keeper has to see to."""

    REQUEST = "the service asks"
    LOST = "the service is gone"
    TAKEN = "another service has taken over"
    STOP = "the service stops"
    EXPIRED = "no service came in time"
    NOTHING = "time has passed"


@dataclass
class Event:
    """`fd` is the receiver's, -1 without."""

    what: What
    request: dict[str, Any] = field(default_factory=dict)
    blob: bytes = b""
    fd: int = -1


class Reception:
    """From the first service, which started the keeper, to the last."""

    def __init__(self, runtime_dir: str, first: socket.socket, orphan_s: float):
        self._dir = runtime_dir
        self._listener: socket.socket | None = None
        self._service: socket.socket | None = first
        first.settimeout(_FRAME_S)
        self._heard = time.monotonic()
        self._orphan_s, self._deadline = orphan_s, 0.0
        self.epoch = _epoch()  # names the present connection; no other keeper has one like it
        self.greeting: dict[str, Any] = {}  # what a successor is told first

    def open(self) -> None:
        """Be found by a successor; the instance's lock is held."""
        self._remove()
        listener = socket.socket(socket.AF_UNIX)
        folder = os.open(self._dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        mask = os.umask(0o177)
        try:
            # Through the descriptor: the path itself may be longer than an address can be.
            listener.bind(f"/proc/self/fd/{folder}/{NAME}")
        finally:
            os.umask(mask)
            os.close(folder)
        listener.listen(16)
        listener.setblocking(False)
        self._listener = listener

    def close(self) -> None:
        """Whoever comes now finds nobody, and starts another keeper."""
        self._remove()
        if self._listener:
            self._listener.close()
        if self._service:
            self._service.close()

    def _remove(self) -> None:
        try:
            os.unlink(os.path.join(self._dir, NAME))
        except FileNotFoundError:
            pass

    @property
    def orphaned(self) -> bool:
        return self._service is None

    def wait(self, pause_s: float | None) -> Event:
        """What comes next; NOTHING after `pause_s`."""
        poll = select.poll()
        for end in (self._listener, self._service):
            if end:
                poll.register(end, select.POLLIN)
        waits = [] if pause_s is None else [pause_s]
        if self.orphaned:
            waits.append(max(0.0, self._deadline - time.monotonic()))
        ready = {handle for handle, _ in poll.poll(min(waits) * 1000 if waits else None)}
        if self._service and self._service.fileno() in ready:
            return self._hear(self._service)
        if self._listener and self._listener.fileno() in ready:
            return self._receive(self._listener)
        if self.orphaned and time.monotonic() >= self._deadline:
            return Event(What.EXPIRED)
        return Event(What.NOTHING)

    def expect_no_successor(self) -> None:
        """Until one is there all the same: what the present service has ends with it."""
        self._orphan_s = 0.0

    def answer(self, answer: dict[str, Any], blob: bytes = b"") -> None:
        """To the present service; one that does not take it will be found gone."""
        if self._service is None:
            return
        try:
            wire.send(self._service, answer, blob)
        except OSError:
            _hang_up(self._service)

    def _hear(self, service: socket.socket) -> Event:
        try:
            request, blob, fd = wire.receive(service)
        except (EOFError, OSError, wire.ProtocolError):
            self._lose()
            return Event(What.LOST)
        self._heard = time.monotonic()
        if request.get("op") == "beat":
            return Event(What.NOTHING)
        return Event(What.REQUEST, request, blob, fd)

    def _lose(self) -> None:
        if self._service:
            self._service.close()
        self._service, self._deadline = None, time.monotonic() + self._orphan_s
        # Its messages may be a pipe that somebody reads to its end.
        null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, 2)
        os.close(null)

    def _receive(self, listener: socket.socket) -> Event:
        """A visitor: a successor, or the present service's word that it stops."""
        try:
            visitor, _ = listener.accept()
        except OSError:
            return Event(What.NOTHING)  # gone again
        visitor.settimeout(_FRAME_S)
        if peer(visitor)[1] != os.geteuid():
            visitor.close()
            return Event(What.NOTHING)
        try:
            request, _, fd = wire.receive(visitor)
        except (EOFError, OSError, wire.ProtocolError):
            visitor.close()
            return Event(What.NOTHING)
        try:
            return self._greet(visitor, request, fd)
        finally:
            if fd >= 0:
                os.close(fd)

    def _greet(self, visitor: socket.socket, request: dict[str, Any], fd: int) -> Event:
        if request.get("op") == "stop":
            known = request.get("epoch") == self.epoch
            _reply(visitor, {"ok": known})
            visitor.close()
            return Event(What.STOP if known else What.NOTHING)
        if self._service and time.monotonic() - self._heard < _SILENT_S:
            _reply(visitor, {"busy": True})
            visitor.close()
            return Event(What.NOTHING)
        if self._service:
            _hang_up(self._service)
            self._service.close()
        self.epoch = _epoch()
        self._service, self._heard = visitor, time.monotonic()
        self._orphan_s = float(request["orphan_s"])
        if fd >= 0:
            os.dup2(fd, 2)
        self.answer(self.greeting | {"epoch": self.epoch})
        return Event(What.TAKEN)


def _epoch() -> str:
    return os.urandom(8).hex()


def peer(end: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket."""
    size = _CREDENTIALS.size
    pid, uid, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def _reply(visitor: socket.socket, answer: dict[str, Any]) -> None:
    try:
        wire.send(visitor, answer)
    except OSError:
        return  # it did not wait


def _hang_up(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # gone already
