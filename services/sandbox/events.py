"""What the pool of boxes is told, and what it orders. Carriers only."""

from __future__ import annotations

from msgspec.structs import replace

from muster.types import EpisodeKey, Value
from services.sandbox.warm import Kind


def identity(key: EpisodeKey) -> EpisodeKey:
    """The attempt, whoever owns it: what a box belongs to."""
    return replace(key, owner_epoch=0)


class Asked(Value, frozen=True, tag=True):
    """A caller wants a box for `key` and waits until `deadline`.

    kind: what has to be in it; None for one that only its caller can fill (a fork). since: when the
    attempt began to wait, maybe in an earlier call that came to its deadline; equal ones are served
    as they came.
    """

    ticket: int
    key: EpisodeKey
    deadline: float
    kind: Kind | None = None
    since: float = 0.0


class GaveUp(Value, frozen=True, tag=True):
    """The caller behind a ticket has gone."""

    ticket: int


class Started(Value, frozen=True, tag=True):
    """A box that was started, for a caller or to stand ready, can take its first step."""

    box: str
    took_s: float = 0.0


class StartFailed(Value, frozen=True, tag=True):
    """The start ended without a box, and nothing of it is left."""

    box: str


class Handed(Value, frozen=True, tag=True):
    """A warm box was found alive, and is its caller's."""

    box: str


class FoundDead(Value, frozen=True, tag=True):
    """A warm box was not alive: its caller waits again, where it stood."""

    box: str


class Built(Value, frozen=True, tag=True):
    """A set-up ended: its snapshot is there, its box is not."""

    box: str


class BuildFailed(Value, frozen=True, tag=True):
    """A set-up ended without a snapshot, and nothing of its box is left."""

    box: str


class Known(Value, frozen=True, tag=True):
    """The snapshot of a set-up is there, from before."""

    content: str


class Dropped(Value, frozen=True, tag=True):
    """The snapshot of a set-up is there no more."""

    content: str


class Adopted(Value, frozen=True, tag=True):
    """A box of a former service of this instance goes on under its last key."""

    box: str
    key: EpisodeKey


class Working(Value, frozen=True, tag=True):
    """A step, a verification or a copy begins in a box in use."""

    box: str


class Rested(Value, frozen=True, tag=True):
    """It is over."""

    box: str


class Resized(Value, frozen=True, tag=True):
    """Other bounds from now on."""

    boxes_max: int
    warm_max: int


class Spoke(Value, frozen=True, tag=True):
    """A call arrived for a box: `key` is alive, and so is its epoch."""

    key: EpisodeKey
    box: str = ""


class Claimed(Value, frozen=True, tag=True):
    """A router says that it owns the run."""

    run: str
    owner_epoch: int


class Released(Value, frozen=True, tag=True):
    box: str


class Ended(Value, frozen=True, tag=True):
    """Nothing of the box is left."""

    box: str


class Ticked(Value, frozen=True, tag=True):
    """Time passed."""


Event = (
    Asked
    | GaveUp
    | Started
    | StartFailed
    | Handed
    | FoundDead
    | Built
    | BuildFailed
    | Known
    | Dropped
    | Adopted
    | Working
    | Rested
    | Resized
    | Spoke
    | Claimed
    | Released
    | Ended
    | Ticked
)


class StartBox(Value, frozen=True, tag=True):
    """Start a box and grant it to `ticket`."""

    ticket: int
    box: str
    key: EpisodeKey


class StartWarm(Value, frozen=True, tag=True):
    """Start a box that nobody has asked for."""

    box: str
    kind: Kind


class HandOver(Value, frozen=True, tag=True):
    """See whether the warm box is alive, and grant it to `ticket`."""

    ticket: int
    box: str
    key: EpisodeKey


class RunSetup(Value, frozen=True, tag=True):
    """Make the snapshot that boxes of the kind start from, in a box of that name.

    ticket: of the caller that waits longest for it, for whom it is made.
    """

    box: str
    kind: Kind
    ticket: int


class TellFailure(Value, frozen=True, tag=True):
    """The set-up of `box` failed: so does what the caller asked for."""

    ticket: int
    box: str


class RefuseTicket(Value, frozen=True, tag=True):
    ticket: int
    fenced: bool
    problem: str


class EndBox(Value, frozen=True, tag=True):
    box: str
    why: str


class TellFormer(Value, frozen=True, tag=True):
    """A newer owner has spoken: callers of older epochs that wait for an answer are fenced."""


Command = (
    StartBox | StartWarm | HandOver | RunSetup | TellFailure | RefuseTicket | EndBox | TellFormer
)
