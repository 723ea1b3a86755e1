"""The states of the machines in a world, for faults that wait for one and for counting what met.

Owns: the names of all states, who is in which now, how often each kind of fault met each. Promise:
read-only; a fault meets a state when some machine is in it at the moment of the effect (which is
what makes a pair of them dangerous: the victim's caller, or who waits for it, is there just then).
Does not cover: faults (faults.py, inject.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from services.router.attempt import Phase
from services.router.health import Standing
from services.trainer.schedule import Phase as Training
from sim.faults import Kind

if TYPE_CHECKING:
    from sim.experiment import Bench

KV = "episode held for KV"
EPISODE = tuple(f"episode {phase}" for phase in Phase if phase is not Phase.OVER)
REPLICA = tuple(f"replica {standing}" for standing in Standing)
LEASE = tuple(
    f"lease {name}" for name in ("unregistered", "none", "asked", "freezing", "held", "ending")
)
TRAINER = ("trainer down", *(f"trainer {p}" for p in Training if p is not Training.STOPPED))
PUBLICATION = ("publication none", "publication sent", "publication partial")
LEADER = ("router absent", "router recovering")
STATES = (*EPISODE, KV, *REPLICA, *LEASE, *TRAINER, *PUBLICATION, *LEADER)
"""All that a fault can meet."""
_PART = {state: state.partition(" ")[0] for state in STATES}
_STANDING = {standing: f"replica {standing}" for standing in Standing}
_PHASE = {phase: f"episode {phase}" for phase in Phase}

MET_MIN = 10
IMPOSSIBLE: Mapping[tuple[Kind, str], str] = {}
"""Pairs that cannot meet, each with its reason."""


class States:
    """Of one world."""

    def __init__(self, bench: Bench):
        self._bench = bench
        self._parts: dict[str, Callable[[], Iterable[str]]] = {
            "episode": self._episodes,
            "replica": self._replicas,
            "lease": self._leases,
            "trainer": self._trainer,
            "publication": self._publication,
            "router": self._leader,
        }

    def now(self) -> set[str]:
        """Every state that some machine is in."""
        return {state for part in self._parts.values() for state in part()}

    def has(self, state: str) -> bool:
        """Some machine is in this state."""
        return state in self._parts[_PART[state]]()

    def _episodes(self) -> Iterator[str]:
        for router in self._bench.routers:
            if router.machine is None:
                continue
            for episode in router.machine._episodes.values():
                yield _PHASE[episode.phase]
                if episode.phase is Phase.HOLD and episode.held_for_kv:
                    yield KV

    def _replicas(self) -> Iterator[str]:
        for router in self._bench.routers:
            if router.machine is not None:
                for known in router.machine._fleet.health._known.values():
                    yield _STANDING[known.standing]

    def _leases(self) -> Iterator[str]:
        for bank in self._bench.banks:
            if bank.machine is None or not bank.serves:
                continue
            leases = bank.machine.leases
            yield "lease unregistered" if not leases.registered else "lease none"
            if leases.waiting is not None:
                yield "lease asked"
            if leases.freezing:
                yield "lease freezing"
            if any(step > leases.last_durable for step in leases.frozen):
                yield "lease held"
            if leases._training:
                yield "lease ending"

    def _trainer(self) -> Iterator[str]:
        machine = self._bench.trainer.machine
        yield "trainer down" if machine is None else f"trainer {machine.phase}"

    def _publication(self) -> Iterator[str]:
        versions = {r.version for r in self._bench.replicas if r.up and r.serves}
        sent = "Publish" in self._bench.trainer.doing.values()
        yield "publication sent" if sent else "publication none"
        if len(versions) > 1:
            yield "publication partial"

    def _leader(self) -> Iterator[str]:
        machines = [r.machine for r in self._bench.routers if r.machine is not None]
        if not machines:
            yield "router absent"
        elif not any(machine._recovered for machine in machines):
            yield "router recovering"


def seldom(reach: Mapping[str, int], kinds: Iterable[Kind] = tuple(Kind)) -> list[tuple[int, str]]:
    """How often each possible pair met, the rarest first."""
    counted = [
        (reach.get(f"{kind} | {state}", 0), f"{kind} | {state}")
        for kind in kinds
        for state in STATES
        if (kind, state) not in IMPOSSIBLE
    ]
    return sorted(counted)


def table(reach: Mapping[str, int]) -> list[str]:
    """For people: the least of each kind of fault, and what it met least."""
    lines = []
    for kind in Kind:
        found = seldom(reach, (kind,))
        least = ", ".join(f"{at.partition(' | ')[2]} {n}" for n, at in found[:3])
        lines.append(f"  {kind:<18} {least}")
    every = seldom(reach)
    few = sum(count < MET_MIN for count, _ in every)
    lines.append(f"  {len(every)} pairs, the rarest met {every[0][0]} times; {few} below {MET_MIN}")
    return lines
