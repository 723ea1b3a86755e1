"""The effect of each fault on the world, and its end.

Owns: choosing victims, counting what truly happened. Promise: a fault is counted when it had an
effect, with what its victim was doing then (KIND/ROLE/CALL), and with what episodes waited for
(KIND@CALL); after `heal` all clocks are right, all lines are up, everybody goes on. Does not cover:
which faults (faults.py), lines (net.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.faults import ARMED, PHASES, POWER_CUTS, WINDOWS, Fault, Kind
from sim.host import Host
from sim.led import Shared
from sim.process import Process
from sim.trainer import Trainer
from sim.world import Do


class Injector:
    """Of one world."""

    def __init__(self, shared: Shared, trainer: Trainer, hosts: Sequence[Host]):
        self.shared, self.trainer, self.hosts = shared, trainer, hosts
        self._world, self._store = shared.world, shared.store
        self.on_power_cut: list[Do] = []

    def apply(self, fault: Fault) -> None:
        if fault.kind in ARMED:
            self.shared.net.arm(fault)
            return
        if fault.kind in WINDOWS:
            self.shared.net.open_window(fault)
            return
        victim = self._victim(fault)
        states = sorted(set(victim.doing.values())) or ["idle"]
        phases = sorted(self._phases())
        if self._strike(fault, victim):
            self._world.fired[fault.kind] += 1
            self._world.note("bench", f"{fault.kind} {victim.name} {fault.amount}")
            for phase in phases:
                self._world.reach[f"{fault.kind}@{phase}"] += 1
            for state in states:
                self._world.reach[f"{fault.kind}/{victim.role}/{state}"] += 1

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
        return found[int(fault.amount * 1000) % len(found)] if found else self.shared.server

    def _host(self, fault: Fault) -> Host:
        return self.hosts[int(fault.amount * 1000) % len(self.hosts)]

    def heal(self) -> None:
        self._world.note("bench", "healed")
        self.shared.net.heal()
        self._store.clock_offset_s = 0.0
        for process in self.shared.processes.values():
            process.wall_offset_s = 0.0
            process.wake()
