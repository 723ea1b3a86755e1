"""The effect of each fault on the world, and its end.

Owns: choosing victims, counting what truly happened. Promise: a fault is counted when it had an
effect, with what its victim was doing then (KIND/ROLE/CALL), and with what episodes waited for
(KIND@CALL); after `heal` all clocks are right, all lines are up, everybody goes on. Does not cover:
which faults (faults.py), lines (net.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.engine import Replica
from sim.faults import ARMED, OF_REPLICA, PHASES, POWER_CUTS, WINDOWS, Fault, Kind
from sim.host import Host
from sim.led import Shared
from sim.process import Process
from sim.states import States
from sim.trainer import Trainer
from sim.world import Do


class Injector:
    """Of one world."""

    def __init__(self, shared: Shared, trainer: Trainer, hosts: Sequence[Host], states: States):
        self._states = states
        self.waiting: list[Fault] = []  # for a state
        self.shared, self.trainer, self.hosts = shared, trainer, hosts
        self._world, self._store = shared.world, shared.store
        self.on_power_cut: list[Do] = []

    def plan(self, fault: Fault) -> None:
        """Its time has come: now, or as soon as a machine is in the state that it waits for (an
        armed one looks for that at each call)."""
        if fault.at_state and fault.kind not in ARMED:
            self.waiting.append(fault)
        else:
            self.apply(fault)

    def look(self) -> None:
        """Apply what waits for a state that is there now; without an effect it waits on."""
        there = {state for state in {f.at_state for f in self.waiting} if self._states.has(state)}
        for fault in [f for f in self.waiting if f.at_state in there] if there else ():
            if self.apply(fault):
                self.waiting.remove(fault)

    def apply(self, fault: Fault) -> bool:
        """True when it had an effect, or lies in wait for one."""
        if fault.kind in ARMED:
            self.shared.net.arm(fault)
            return True
        if fault.kind in WINDOWS:
            self.shared.net.open_window(fault)
            return True
        victim = self._victim(fault)
        states = sorted(set(victim.doing.values())) or ["idle"]
        phases = sorted(self._phases())
        met = list(self._world.states())
        if not self._strike(fault, victim):
            return False
        self._world.fired[fault.kind] += 1
        for state in met:
            self._world.reach[f"{fault.kind} | {state}"] += 1
        self._world.note("bench", f"{fault.kind} {victim.name} {fault.amount}")
        for phase in phases:
            self._world.reach[f"{fault.kind}@{phase}"] += 1
        for state in states:
            self._world.reach[f"{fault.kind}/{victim.role}/{state}"] += 1
        return True

    def _phases(self) -> set[str]:
        """What the episodes wait for, whoever is the victim."""
        doing = {call for r in self.shared.of_role("router") for call in r.doing.values()}
        return doing & PHASES

    def _strike(self, fault: Fault, victim: Process) -> bool:
        """True when it had an effect."""
        match fault.kind:
            case Kind.KILL | Kind.HANG:
                return self._stop(fault, victim)
            case Kind.CLOCK_JUMP if victim is self.shared.server:
                self._store.clock_offset_s += fault.amount
            case Kind.CLOCK_JUMP:
                victim.wall_offset_s += fault.amount
            case Kind.BOX_LOST | Kind.BOXES_LOST:
                return self._lose_boxes(fault)
            case Kind.STORE_RESTART | Kind.POWER_CUT | Kind.STORE_POWER_CUT:
                self.shared.server.kill(fault.span_s)
                self._store.waiting.clear()
                if fault.kind in POWER_CUTS:
                    self._cut_power(fault)
            case Kind.ROLLBACK:
                return self.trainer.roll_back()
            case _:
                assert isinstance(victim, Replica)
                return self._spoil(fault, victim)
        return True

    @staticmethod
    def _spoil(fault: Fault, replica: Replica) -> bool:
        """True when it had an effect."""
        if not replica.up or replica.wedged:
            return False
        match fault.kind:
            case Kind.REPLICA_WEDGE | Kind.LATE_REPLY:
                replica.wedge(fault.span_s, deaf=fault.kind is Kind.LATE_REPLY)
            case Kind.REPLICA_SLOW:
                replica.slow(fault.span_s)
            case Kind.CREDIT_LIE:
                replica.tell_lies(10.0 if fault.amount * 7 % 1 < 0.5 else 0.0, fault.span_s)
            case Kind.REPLICA_OLD:
                return replica.come_back_old(0.5)
            case Kind.REPLICA_BLOCKS:
                return replica.come_back_other(0.5)
            case _:
                raise ValueError(fault.kind)
        return True

    def _cut_power(self, fault: Fault) -> None:
        """Of the machine that has the store, and perhaps the routers and the banks."""
        self._store.power_cut(fault.amount)
        if fault.kind is Kind.POWER_CUT:
            for process in (*self.shared.of_role("router"), *self.shared.of_role("readybank")):
                process.kill(fault.span_s)
        for tell in self.on_power_cut:
            tell()

    @staticmethod
    def _stop(fault: Fault, victim: Process) -> bool:
        if not victim.up or victim.hung:
            return False
        if fault.kind is Kind.KILL:
            victim.kill(fault.span_s)
        else:
            victim.hang(fault.span_s)
        return True

    def _lose_boxes(self, fault: Fault) -> bool:
        host = self._host(fault)
        if not host.boxes:  # then of another one
            host = next((other for other in self.hosts if other.boxes), host)
        if fault.kind is Kind.BOX_LOST:
            return bool(host.lose(fault.amount * 7 % 1))
        lost = False
        while host.lose(0.0):
            lost = True
        return lost

    def _victim(self, fault: Fault) -> Process:
        if fault.kind is Kind.ROLLBACK:
            return self.trainer
        if fault.kind in (Kind.BOX_LOST, Kind.BOXES_LOST):
            return self._host(fault)
        found = self.shared.of_role(fault.who)
        if fault.kind in OF_REPLICA:  # one on which it has an effect, if any is there
            able = [r for r in found if isinstance(r, Replica) and r.up and not r.wedged]
            found = [*able] or found
        return found[int(fault.amount * 1000) % len(found)] if found else self.shared.server

    def _host(self, fault: Fault) -> Host:
        return self.hosts[int(fault.amount * 1000) % len(self.hosts)]

    def heal(self) -> None:
        self._world.note("bench", "healed")
        self.waiting.clear()
        self.shared.net.heal()
        self._store.clock_offset_s = 0.0
        for process in self.shared.processes.values():
            process.wall_offset_s = 0.0
            process.wake()
            if isinstance(process, Replica):
                process.well()
                process.unwedge()
