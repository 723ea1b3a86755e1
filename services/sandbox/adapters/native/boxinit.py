"""PID 1 of a box: serves whoever owns the box now, and outlives an owner that is gone.

Owns: the control connection, and the answers of the newest steps by turn. Promise: requests are
answered one after the other; a step goes on when the service that asked for it is gone, its answer
is kept, and a successor, whose connection comes from the keeper, is told of it; what the former
service had sent by then but nobody had read is never carried out. Ends with the keeper. It waits
for no peer: one that stops in the middle of a frame holds up nothing.
Does not cover: how a step runs (steps.py). Standard library only, one thread.
"""

from __future__ import annotations

import select
import signal
import socket
from collections import OrderedDict
from typing import Any

from services.sandbox.adapters.native import copying, links, putting, wire
from services.sandbox.adapters.native.confine import Rules
from services.sandbox.adapters.native.line import Line
from services.sandbox.adapters.native.steps import Answer, Doors, Session, Steps

_KEPT_BYTES = 8 << 20  # of all answers but the newest; nothing else bounds PID 1's memory
_GONE = select.POLLHUP | select.POLLERR
# Not waiting for a step that a former service asked for.
_MEANWHILE = {"kept", "rejoin", "alive"}


class Init:
    """The loop of PID 1."""

    def __init__(self, doors: Doors, rules: Rules):
        self._door = doors.keeper
        self._door.setblocking(False)
        self._control: Line | None = Line(doors.control)
        self._rules = rules
        self._steps = Steps(doors, rules)
        self._copies = copying.Copies(rules)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._kept: OrderedDict[int, tuple[str, Answer]] = OrderedDict()
        self._kept_max = 1
        self._newest = -1
        self._asked = (-1, "")  # turn and command of the step that runs
        self._owed = False  # the present owner waits for that step's answer

    def run(self) -> None:
        """Serve until the keeper's door closes."""
        self._tell({"ready": True})
        while self._wait():
            self._finish()
            self._serve_waiting()

    def _wait(self) -> bool:
        """Drain, reap, hear, until something may have happened; False when the keeper is gone."""
        poll = select.poll()
        poll.register(self._door, select.POLLIN)
        poll.register(self._steps.wake, select.POLLIN)
        if self._control:
            poll.register(self._control.handle, self._control.events)
        for handle in self._steps.outputs():
            poll.register(handle, select.POLLIN)
        pause = self._steps.pause()
        ready = dict(poll.poll(None if pause is None else pause * 1000))
        self._steps.drain(set(ready))
        self._steps.reap()
        # Before anything that the former owner may have sent: a successor hears what has begun.
        if self._door.fileno() in ready and not self._take_control():
            return False
        if self._control:
            self._attend(self._control, ready.get(self._control.handle, 0))
        return True

    def _attend(self, control: Line, ready: int) -> None:
        if ready & select.POLLIN:
            well = control.hear()
        else:
            well = not ready & _GONE
        if not (well and control.flush()):
            self._drop_control()

    def _drop_control(self) -> None:
        if self._control:
            self._control.close()
        self._control, self._owed = None, False

    def _take_control(self) -> bool:
        """Give the box to the owner at the other end of a socket that the keeper sends."""
        try:
            word, fd = wire.receive_fd(self._door, 64)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not word:
            return False
        if fd >= 0:
            self._drop_control()
            self._control = Line(socket.socket(fileno=fd))
            self._finish()  # a step that ended this moment is told as ended
            turn, command = self._asked
            running = [turn, command] if self._steps.running and turn >= 0 else None
            self._tell(
                {"ready": True, "newest": self._newest, "running": running}
                | {"kept": list(self._kept), "left_s": self._steps.left_s}
            )
        return True

    def _tell(self, answer: dict[str, Any], blob: bytes = b"") -> None:
        try:
            well = self._control is None or self._control.tell(answer, blob)
        except wire.ProtocolError as error:  # of what the agent left: not worth the box
            return self._tell({"error": str(error)})
        if not well:
            self._drop_control()

    def _serve_waiting(self) -> None:
        """Answer what has come; what follows a step waits for that step's answer."""
        while self._control and not self._owed:
            try:
                asked = self._control.next()
            except wire.ProtocolError:
                return self._drop_control()
            if asked is None:
                return
            try:
                answer, blob = self._serve(*asked)
            except OSError as error:
                answer, blob = {"error": f"{error.strerror or error}"}, b""
            if not self._owed:
                self._tell(answer, blob)

    def _serve(self, request: dict[str, Any], blob: bytes) -> Answer:
        op = request["op"]
        if self._steps.running and op not in _MEANWHILE:
            return {"error": "a step of a former service is running"}, b""
        if op == "run":
            return self._begin(request)
        if op == "put":
            return putting.put(request, blob, self._rules), b""
        if op.startswith("copy_"):
            return self._copies.serve(request, blob)
        if op == "session?":
            return {"ok": True}, self._steps.session.packed()
        if op == "session":
            return self._enter(request, blob), b""
        if op == "cut_links":
            return {"ok": True, "cut": links.cut()}, b""
        if op == "kept":
            return self._told(int(request["turn"]))
        if op == "rejoin":
            return self._rejoin(int(request["turn"]))
        return {"ok": True} if op == "alive" else {"error": "unknown request"}, b""

    def _enter(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        self._steps.session = Session.unpacked(blob)
        if request["make_cwd"]:
            return putting.make_folder(self._steps.session.cwd, self._rules)
        return {"ok": True}

    def _begin(self, request: dict[str, Any]) -> Answer:
        turn = int(request.get("turn", -1))
        self._asked = turn, str(request.get("command", ""))
        self._kept_max = int(request.get("keep", 1))
        self._newest = max(self._newest, turn)
        refusal = self._steps.begin(request)
        if refusal:
            self._keep((refusal, b""))
            return refusal, b""
        self._owed = True
        return {}, b""

    def _rejoin(self, turn: int) -> Answer:
        if self._steps.running and self._asked[0] == turn:
            self._owed = True
            return {}, b""
        if turn in self._kept:
            return self._kept[turn][1]
        return {"error": f"there is no answer of turn {turn}"}, b""

    def _told(self, turn: int) -> Answer:
        if turn not in self._kept:
            return {"error": "no longer kept"}, b""
        command, (answer, output) = self._kept[turn]
        return answer | {"command": command}, output

    def _finish(self) -> None:
        """Keep and tell the answer of a step that has ended."""
        answer = self._steps.result()
        if answer is None:
            return
        self._keep(answer)
        if self._owed:
            self._owed = False
            self._tell(*answer)

    def _keep(self, answer: Answer) -> None:
        turn, command = self._asked
        if turn < 0 or "error" in answer[0]:
            return  # what an error leaves is not known, to nobody
        self._kept[turn] = command, answer
        while len(self._kept) > self._kept_max or (
            len(self._kept) > 1 and sum(map(_size, self._kept.values())) > _KEPT_BYTES
        ):
            self._kept.popitem(last=False)


def _size(kept: tuple[str, Answer]) -> int:
    command, (_, output) = kept
    return len(command) + len(output)
