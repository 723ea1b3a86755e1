"""The faults of a seed, drawn up front as an explicit list.

Owns: kinds, rates, the drawing. Promise: the list is all that ever goes wrong by chance, so a
failure is shrunk by leaving faults out; rates differ from seed to seed, as in TigerBeetle's
simulator, so that some seeds see one kind only and some see everything. Does not cover: their
effect (net.py, process.py, experiment.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec.structs import replace

from muster.types import Value


class Kind(StrEnum):
    """What goes wrong."""

    # Armed: the next fitting call meets it.
    KILL_BEFORE = "kill_before"  # the caller dies before the effect
    KILL_AFTER = "kill_after"  # the caller dies after the effect, before the reply
    KILL_BEFORE_SERVE = "kill_before_serve"  # so does the callee
    KILL_AFTER_SERVE = "kill_after_serve"
    DUPLICATE = "duplicate"  # served twice
    LOST_REQUEST = "lost_request"
    LOST_REPLY = "lost_reply"
    LIE = "lie"  # done, and reported as failed
    # For a while: every fitting call meets it.
    DELAY = "delay"
    REORDER = "reorder"
    PARTITION = "partition"
    # At once.
    KILL = "kill"
    HANG = "hang"  # SIGSTOP, later SIGCONT
    CLOCK_JUMP = "clock_jump"
    BOX_LOST = "box_lost"
    BOXES_LOST = "boxes_lost"  # all of a host, which lives on
    STORE_RESTART = "store_restart"
    POWER_CUT = "power_cut"  # of the machine with the store, which loses up to a second (everysec)
    STORE_POWER_CUT = "store_power_cut"  # the same, while the others live on
    ROLLBACK = "rollback"  # the trainer dies, and its newest checkpoint with it
    # Of a replica.
    REPLICA_WEDGE = "replica_wedge"  # it says how it fares, and its engine takes no step; killed
    REPLICA_SLOW = "replica_slow"  # ten times as long, for a while
    REPLICA_OLD = "replica_old"  # it comes back with the weights before the newest
    REPLICA_BLOCKS = "replica_blocks"  # it comes back with blocks of another size
    CREDIT_LIE = "credit_lie"  # it grants ten times what it has, or nothing, for a while
    LATE_REPLY = "late_reply"  # it hangs, hears no abort, and then answers what was given up


ARMED = (
    Kind.KILL_BEFORE,
    Kind.KILL_AFTER,
    Kind.KILL_BEFORE_SERVE,
    Kind.KILL_AFTER_SERVE,
    Kind.DUPLICATE,
    Kind.LOST_REQUEST,
    Kind.LOST_REPLY,
    Kind.LIE,
)
POWER_CUTS = (Kind.POWER_CUT, Kind.STORE_POWER_CUT)
OF_REPLICA = (
    Kind.REPLICA_WEDGE,
    Kind.REPLICA_SLOW,
    Kind.REPLICA_OLD,
    Kind.REPLICA_BLOCKS,
    Kind.CREDIT_LIE,
    Kind.LATE_REPLY,
)
WINDOWS = (Kind.DELAY, Kind.REORDER, Kind.PARTITION)
ROLES = ("router", "readybank", "trainer", "sandbox", "inference")
OPS: dict[str, tuple[str, ...]] = {
    "router": (
        "lead",
        "epoch",
        "beat",
        "recover",
        "tail",
        "OpenGroup",
        "AcquireBox",
        "Generate",
        "RecordIntent",
        "Exec",
        "RecordTurn",
        "RecordRestored",
        "Verify",
        "RecordEpisode",
        "ReleaseBox",
        "ClaimHost",
        "GrantKv",
        "Probe",
        "Abort",
    ),
    "readybank": (
        "lead",
        "epoch",
        "beat",
        "recover",
        "tail",
        "WriteFrozen",
        "WriteTrained",
        "WriteFate",
        "WriteMark",
        "Retire",
        "Trim",
        "in_charge",
        "payloads",
    ),
    "trainer": ("epoch", "Register", "LeaseBatch", "AcknowledgeBatch", "RecordVersion", "Publish"),
    "sandbox": ("AcquireBox", "Exec", "Verify", "ReleaseBox", "ClaimHost"),
    "inference": ("Generate", "Publish", "GrantKv", "Probe", "Abort"),
}
PHASES = frozenset(  # calls by which an episode goes on
    (
        *("OpenGroup", "AcquireBox", "Generate", "RecordIntent", "Exec", "RecordTurn"),
        *("RecordRestored", "Verify", "RecordEpisode"),
    )
)
_CALLER = {
    Kind.KILL_BEFORE: ("router", "readybank", "trainer"),
    Kind.KILL_AFTER: ("router", "readybank", "trainer"),
    Kind.KILL_BEFORE_SERVE: ("sandbox", "inference"),
    Kind.KILL_AFTER_SERVE: ("sandbox", "inference"),
}


class Named(Protocol):
    """A process, as far as a fault must know it."""

    name: str
    role: str


class Fault(Value, frozen=True):
    """One fault. `who` and `other` are roles or process names, "" is any."""

    kind: Kind
    at_s: float
    who: str = ""
    other: str = ""
    op: str = ""  # the call it waits for
    span_s: float = 0.0  # how long, or how long the killed stay down
    amount: float = 0.0  # seconds of delay or of jump, or a chance in [0, 1) that picks the victim
    at_state: str = ""  # from `at_s` on it waits until some machine is in this state (states.py)

    def hits(self, name: str, role: str) -> bool:
        return self.who in ("", name, role)

    def between(self, one: Named, two: Named) -> bool:
        def is_(fault: str, process: Named) -> bool:
            return fault in ("", process.name, process.role)

        return (is_(self.who, one) and is_(self.other, two)) or (
            is_(self.who, two) and is_(self.other, one)
        )


_PAIRS = (
    ("router", "store"),
    ("readybank", "store"),
    ("trainer", "store"),
    ("router", "sandbox"),
    ("router", "inference"),
    ("trainer", "readybank"),
    ("trainer", "inference"),
    ("router-a", "store"),
    ("router-b", "store"),
    ("readybank-a", "store"),
    ("readybank-b", "store"),
    ("host-0", "router"),
    ("", "store"),
)


AIMED = 16  # pairs of a kind and a state, in each seed
_OFTEN = {  # how often each is tried, by how seldom it is there by itself; others: once
    "episode box": 2,
    "episode intend": 3,
    "episode record": 3,
    "episode finish": 4,
    "episode replay": 4,
    "lease freezing": 14,
    "lease held": 2,
    "lease ending": 18,
    "trainer down": 2,
    "trainer starting": 6,
    "trainer training": 3,
    "trainer saving": 3,
    "trainer publishing": 4,
    "publication sent": 2,
    "publication partial": 3,
    "router absent": 5,
    "router recovering": 7,
    "replica silent": 6,
    "replica wedged": 11,
    "replica fenced": 12,
    "replica old": 6,
}
_LATE = (Kind.ROLLBACK, Kind.REPLICA_OLD)  # without effect before the first steps
_BROUGHT_S = 20.0  # how long what brings a state about lasts
_BUSY = "episode generate"


def _brings(kind: Kind, who: str, other: str = "", *, at: str = _BUSY, span: float = 1.0) -> Fault:
    return Fault(kind, 0.0, who, other, span_s=span, at_state=at)


def _cut(who: str, other: str, at: str = _BUSY, span: float = _BROUGHT_S) -> Fault:
    return _brings(Kind.PARTITION, who, other, at=at, span=span)


# Ways to bring a state about; each fault of one waits for a state in which it has an effect.
_BRINGS: dict[str, tuple[tuple[Fault, ...], ...]] = {
    "episode replay": (
        (_brings(Kind.BOX_LOST, "", at="episode step"),),
        (_brings(Kind.BOXES_LOST, "", at="episode step"),),
    ),
    "replica wedged": (
        (_brings(Kind.REPLICA_WEDGE, "inference", span=_BROUGHT_S),),
        (_brings(Kind.LATE_REPLY, "inference", span=_BROUGHT_S),),
    ),
    "replica old": (
        (_brings(Kind.REPLICA_OLD, "inference"),),
        # For longer than a replica that is well may stay behind.
        (_cut("trainer", "replica-0", "trainer training", 2 * _BROUGHT_S),),
    ),
    # It announces itself, and does not answer.
    "replica silent": ((_cut("router", "replica-0"),), (_cut("router", "replica-1"),)),
    # It comes back with weights that are saved, and cannot be told to serve them.
    "replica fenced": (
        (
            _cut("trainer", "inference", "trainer training"),
            _brings(Kind.KILL, "inference", at="trainer publishing", span=0.2),
        ),
    ),
    "publication partial": (
        (_cut("trainer", "replica-1", "trainer training"),),
        (_brings(Kind.REPLICA_OLD, "inference"),),
    ),
    "trainer down": ((_brings(Kind.KILL, "trainer", span=5.0),), (_brings(Kind.ROLLBACK, ""),)),
    "trainer starting": ((_brings(Kind.KILL, "trainer"),), (_brings(Kind.ROLLBACK, ""),)),
    "router absent": (
        (_brings(Kind.KILL, "router"),),
        # The trainer goes on calling replicas meanwhile.
        (_brings(Kind.KILL, "router", at="publication sent", span=5.0),),
    ),
    "router recovering": ((_brings(Kind.KILL, "router"),),),
    "lease unregistered": ((_brings(Kind.KILL, "readybank"),),),
}


def draw(
    seed: int,
    *,
    until_s: float,
    mean: float,
    power_cuts: bool = False,
    only: Sequence[str] = (),
    states: Sequence[str] = (),
) -> tuple[Fault, ...]:
    """About `mean` faults within `until_s`, in order of time, and some that wait for `states`."""
    rng = random.Random(f"{seed}/faults")
    kinds = [k for k in Kind if k in only or not only]
    kinds = [k for k in kinds if power_cuts or k not in POWER_CUTS]
    weights = [rng.choice((0.0, 0.2, 1.0, 1.0, 3.0)) for _ in kinds]
    if not any(weights):
        weights = [1.0] * len(kinds)
    count = min(int(rng.expovariate(1.0 / mean)) + 1, int(3 * mean))
    drawn = [_one(rng, rng.choices(kinds, weights)[0], until_s) for _ in range(count)]
    drawn += _aimed(rng, seed, kinds, states, until_s)
    return tuple(sorted(drawn, key=lambda fault: fault.at_s))


def _aimed(
    rng: random.Random, seed: int, kinds: Sequence[Kind], states: Sequence[str], until_s: float
) -> list[Fault]:
    """Faults that wait for a state, and what brings rare ones about just before.

    The pairs of both are gone through in turn, from seed to seed.
    """
    found: list[Fault] = []
    for kind, state in _in_turn(seed, kinds, states):
        at = rng.uniform(0.5, 0.5 * until_s) + (0.2 * until_s if kind in _LATE else 0.0)
        ways = _BRINGS.get(state)
        if ways is not None:
            picks = rng.random()
            found += [replace(fault, at_s=at, amount=picks) for fault in rng.choice(ways)]
        fault = replace(_one(rng, kind, until_s), at_s=at, at_state=state)
        if kind in ARMED:  # at any call while the state lasts
            fault = replace(fault, op="", who=fault.who if kind in _CALLER else "")
        found.append(fault)
    return found


def _in_turn(seed: int, kinds: Sequence[Kind], states: Sequence[str]) -> list[tuple[Kind, str]]:
    """The pairs that this seed aims at. Power cuts are in few seeds only, and are half of those."""
    found: list[tuple[Kind, str]] = []
    cuts = [kind for kind in kinds if kind in POWER_CUTS]
    others = [kind for kind in kinds if kind not in POWER_CUTS]
    for of in (cuts, others) if cuts and others else (kinds,):
        pairs = [
            (kind, state)
            for kind in of
            for state in states
            for _ in range(_OFTEN.get(state, 1) * (3 if kind is Kind.ROLLBACK else 1))
        ]
        random.Random(len(pairs)).shuffle(pairs)
        count = AIMED // 2 if of is cuts else AIMED
        # In every fourth seed power is cut: those go on by one step in four seeds.
        first = count * (seed // 4 if of is cuts else seed)
        found += [pairs[(first + n) % len(pairs)] for n in range(count) if pairs]
    return found


def _one(rng: random.Random, kind: Kind, until_s: float) -> Fault:
    at, span = rng.uniform(0.5, until_s), rng.choice((0.2, 1.0, 5.0, 15.0))
    if kind in ARMED:
        who = rng.choice(_CALLER.get(kind, ("router", "readybank", "trainer")))
        return Fault(kind, at, who, op=rng.choice(("", *OPS[who])), span_s=span)
    if kind in WINDOWS:
        who, other = rng.choice(_PAIRS)
        amount = rng.choice((0.05, 0.5, 2.0))
        return Fault(kind, at, who, other, span_s=rng.choice((1.0, 5.0, 20.0)), amount=amount)
    amount = rng.random()
    if kind is Kind.CLOCK_JUMP:
        who = rng.choice(("store", "store", *ROLES))
        return Fault(kind, at, who, amount=rng.choice((-3600.0, 3600.0, -5.0, 5.0)))
    if kind is Kind.HANG:
        return Fault(
            kind, at, rng.choice(ROLES), span_s=rng.choice((1.0, 6.0, 60.0)), amount=amount
        )
    if kind is Kind.KILL:
        return Fault(kind, at, rng.choice(ROLES), span_s=span, amount=amount)
    if kind in OF_REPLICA:
        return Fault(kind, at, "inference", span_s=rng.choice((2.0, 8.0, 15.0)), amount=amount)
    return Fault(kind, at, span_s=rng.choice((0.2, 1.0, 5.0)), amount=amount)
