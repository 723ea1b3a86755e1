"""Calls between processes, and all that may go wrong with them.

Owns: latency, deadlines, cut lines, armed faults. Promise: a caller hears of a call exactly once,
at its deadline at the latest, unless it dies before; what a fault does is counted. Does not cover:
which faults there are (faults.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from muster.errors import Unavailable
from sim.faults import Fault, Kind
from sim.process import Process
from sim.world import World

Respond = Callable[[Any], None]
Serve = Callable[[Respond], None]
_LATENCY_S = 0.002


class Net:
    """All lines of the world."""

    def __init__(self, world: World, latency_s: float = _LATENCY_S):
        self.world, self._latency_s = world, latency_s
        self._armed: list[Fault] = []
        self._windows: list[tuple[float, Fault]] = []  # (until, fault)
        self._closes = inf  # the first of them
        self._calls = 0

    # faults

    def arm(self, fault: Fault) -> None:
        """The next call that fits suffers it."""
        self._armed.append(fault)

    def open_window(self, fault: Fault) -> None:
        """Every call that fits suffers it for `fault.span_s`."""
        until = self.world.now + fault.span_s
        self._windows.append((until, fault))
        self._closes = min(self._closes, until)
        self.world.struck(fault.kind)
        self.world.note("net", f"{fault.kind} {fault.who} {fault.other} for {fault.span_s:.1f} s")

    def heal(self) -> None:
        self._armed.clear()
        self._windows.clear()

    def _take(self, kind: Kind, who: Process, op: str) -> Fault | None:
        for fault in self._armed:
            fits = fault.kind is kind and fault.hits(who.name, who.role) and fault.op in ("", op)
            if fits and (not fault.at_state or self.world.has(fault.at_state)):
                self._armed.remove(fault)
                self.world.struck(kind)
                self.world.reach[f"{kind}/{who.role}/{op}"] += 1
                self.world.note(who.name, f"{kind} at {op}")
                return fault
        return None

    def cut(self, one: Process, two: Process) -> bool:
        """A partition stands between them."""
        return any(f.kind is Kind.PARTITION and f.between(one, two) for f in self._open())

    def _open(self) -> list[Fault]:
        """What meets every fitting call now."""
        now = self.world.now
        if now >= self._closes:
            self._windows = [(until, fault) for until, fault in self._windows if now < until]
            self._closes = min((until for until, _ in self._windows), default=inf)
        return [fault for _, fault in self._windows]

    def _extra(self, one: Process, two: Process) -> float:
        """Delay of one message."""
        extra = self.world.spread("latency", self._latency_s)
        for f in self._open():
            if f.between(one, two):
                if f.kind is Kind.DELAY:
                    extra += f.amount
                elif f.kind is Kind.REORDER:
                    extra += self.world.spread("reorder", f.amount)
        return extra

    # calls

    def call(
        self,
        caller: Process,
        callee: Process,
        op: str,
        serve: Serve,
        hear: Callable[[Any], None],
        timeout_s: float,
    ) -> None:
        """Let `callee` serve; `hear` gets its answer, or the error (a value, not raised)."""
        if not caller.up:
            return  # the rest of a handler that was killed in its midst
        kill = self._take(Kind.KILL_BEFORE, caller, op)
        if kill:
            caller.kill(kill.span_s)
            return
        self._calls += 1
        _Call(self, caller, callee, op, hear, self._calls).send(serve, timeout_s)


class _Call:
    """One call under way."""

    def __init__(
        self,
        net: Net,
        caller: Process,
        callee: Process,
        op: str,
        hear: Callable[[Any], None],
        number: int,
    ):
        self.net, self.caller, self.callee, self.op = net, caller, callee, op
        self._hear, self._number, self._heard = hear, number, False
        self._life = caller.life
        caller.doing[number] = op

    def send(self, serve: Serve, timeout_s: float) -> None:
        net = self.net
        late = Unavailable(f"{self.op}: the deadline has passed")
        self.caller.soon(timeout_s, lambda: self._finish(late))
        copies = 1
        if net._take(Kind.LOST_REQUEST, self.caller, self.op):
            copies = 0
        elif net._take(Kind.DUPLICATE, self.caller, self.op):
            copies = 2
        for _ in range(copies):
            wait = net._extra(self.caller, self.callee)
            net.world.after(wait, lambda: self._arrive(serve))

    def _arrive(self, serve: Serve) -> None:
        if self.net.cut(self.caller, self.callee):
            return
        if not self.callee.up:
            self._answer(
                Unavailable(f"failed to connect to {self.callee.name}: Connection refused")
            )
            return
        kill = self.net._take(Kind.KILL_BEFORE_SERVE, self.callee, self.op)
        if kill:
            self.callee.kill(kill.span_s)
            self._answer(Unavailable(f"{self.op}: UNAVAILABLE: {self.callee.name} has gone"))
            return
        broken = Unavailable(f"{self.op}: UNAVAILABLE: {self.callee.name} has gone")
        over = self.callee.serving(lambda: self._answer(broken))

        def respond(result: Any) -> None:
            over()
            self._respond(result)

        self.callee.soon(0.0, lambda: serve(respond))

    def _respond(self, result: Any) -> None:
        """The effect has happened."""
        net = self.net
        kill = net._take(Kind.KILL_AFTER_SERVE, self.callee, self.op)
        if kill:
            net.world.after(0.0, partial(self.callee.kill, kill.span_s))
            result = Unavailable(f"{self.op}: UNAVAILABLE: {self.callee.name} has gone")
        if net._take(Kind.LOST_REPLY, self.caller, self.op):
            return
        if net._take(Kind.LIE, self.caller, self.op):
            result = Unavailable("done, and reported as failed")
        kill = net._take(Kind.KILL_AFTER, self.caller, self.op)
        if kill and self._life == self.caller.life:
            self.caller.kill(kill.span_s)
            return
        self._answer(result)

    def _answer(self, result: Any) -> None:
        net = self.net
        if net.cut(self.caller, self.callee) or self._life != self.caller.life:
            return
        wait = net._extra(self.caller, self.callee)

        def come() -> None:
            if self._life == self.caller.life and not net.cut(self.caller, self.callee):
                self.caller.soon(0.0, lambda: self._finish(result))

        net.world.after(wait, come)

    def _finish(self, result: Any) -> None:
        if not self._heard:
            self._heard = True
            self.caller.doing.pop(self._number, None)
            self._hear(result)
