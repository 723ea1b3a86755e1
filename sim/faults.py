"""The faults of a seed, drawn up front as an explicit list.

Owns: kinds, rates, the drawing. Promise: the list is all that ever goes wrong by chance, so a
failure is shrunk by leaving faults out; rates differ from seed to seed, as in TigerBeetle's
simulator, so that some seeds see one kind only and some see everything. Does not cover: their
effect (net.py, process.py, experiment.py).
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Protocol

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
    "inference": ("Generate", "Publish"),
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


def draw(seed: int, *, until_s: float, mean: float, power_cuts: bool = False) -> tuple[Fault, ...]:
    """About `mean` faults within `until_s`, in order of time."""
    rng = random.Random(f"{seed}/faults")
    kinds = [k for k in Kind if power_cuts or k not in POWER_CUTS]
    weights = [rng.choice((0.0, 0.2, 1.0, 1.0, 3.0)) for _ in kinds]
    if not any(weights):
        weights = [1.0] * len(kinds)
    count = min(int(rng.expovariate(1.0 / mean)) + 1, int(3 * mean))
    drawn = [_one(rng, rng.choices(kinds, weights)[0], until_s) for _ in range(count)]
    return tuple(sorted(drawn, key=lambda fault: fault.at_s))


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
    return Fault(kind, at, span_s=rng.choice((0.2, 1.0, 5.0)), amount=amount)
