"""Which box may exist, for whom, and when it has to go. Pure.

Owns: every box of this host by its state, the callers waiting for one, the newest owner epoch of
each run. Promise: never more than `boxes_max` boxes nor `starting_max` starts at once; callers are
served in order and none waits past its deadline. A box belongs to an attempt, not to an epoch: when
a newer owner speaks, older ones are refused and the boxes live on; a call of the newest owner makes
a box its own, and one that it does not use within `adopt_s` of its first word ends. A box that
nobody touches for `idle_s` ends.
Does not cover: what a box is (box.py), its steps (ledger.py).
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

from msgspec.structs import replace

from muster.errors import Exhausted, Fenced, MusterError, NotFound, Unavailable
from muster.types import EpisodeKey, Value

_RUNS_MAX = 256


class PoolRules(Value, frozen=True):
    """Bounds; idle_s, adopt_s in seconds."""

    boxes_max: int = 32
    starting_max: int = 4
    waiting_max: int = 256
    idle_s: float = 1800.0
    adopt_s: float = 600.0


def identity(key: EpisodeKey) -> EpisodeKey:
    """The attempt, whoever owns it: what a box belongs to."""
    return replace(key, owner_epoch=0)


class Asked(Value, frozen=True, tag=True):
    """A caller wants a box for `key` and waits until `deadline`."""

    ticket: int
    key: EpisodeKey
    deadline: float


class GaveUp(Value, frozen=True, tag=True):
    """The caller behind a ticket has gone."""

    ticket: int


class Started(Value, frozen=True, tag=True):
    box: str


class StartFailed(Value, frozen=True, tag=True):
    """The start ended without a box, and nothing of it is left."""

    box: str


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


Event = Asked | GaveUp | Started | StartFailed | Spoke | Claimed | Released | Ended | Ticked


class StartBox(Value, frozen=True, tag=True):
    """Start a box and grant it to `ticket`."""

    ticket: int
    box: str
    key: EpisodeKey


class RefuseTicket(Value, frozen=True, tag=True):
    ticket: int
    fenced: bool
    problem: str


class EndBox(Value, frozen=True, tag=True):
    box: str
    why: str


class TellFormer(Value, frozen=True, tag=True):
    """A newer owner has spoken: callers of older epochs that wait for an answer are fenced."""


Command = StartBox | RefuseTicket | EndBox | TellFormer


class BoxState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"


class _Owner(Value, frozen=True):
    """The newest owner of a run, and when it spoke first."""

    epoch: int
    since: float


class _Box:
    __slots__ = ("doomed", "key", "state", "touched")

    def __init__(self, key: EpisodeKey, now: float):
        self.key, self.state, self.touched = key, BoxState.STARTING, now
        self.doomed = ""  # why it has to end as soon as it has started


class Pool:
    """The machine; `prefix` makes box names unique across restarts of the host."""

    def __init__(self, rules: PoolRules, prefix: str = "box"):
        self._rules, self._prefix = rules, prefix
        self._boxes: dict[str, _Box] = {}
        self._waiting: OrderedDict[int, Asked] = OrderedDict()
        self._owners: OrderedDict[str, _Owner] = OrderedDict()
        self._count = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        """One event in, commands out, in the order in which they are to be begun."""
        commands: list[Command] = []
        match event:
            case Asked():
                self._ask(event, now, commands)
            case GaveUp(ticket):
                self._waiting.pop(ticket, None)
            case Started(box):
                self._started(box, now, commands)
            case StartFailed(box) | Ended(box):
                self._boxes.pop(box, None)
            case Spoke(key, name):
                self._see(key.run, key.owner_epoch, now, commands)
                self._touch(key, name, now)
            case Claimed(run, epoch):
                self._see(run, epoch, now, commands)
            case Released(box):
                self._end(box, "released", commands)
            case Ticked():
                self._tick(now, commands)
        self._fill(now, commands)
        return commands

    def fence(self, run: str, owner_epoch: int) -> Fenced | None:
        """Why an owner is refused, or None. Changes nothing."""
        owner = self._owners.get(run)
        return None if owner is None or owner_epoch >= owner.epoch else fenced(owner.epoch)

    def refusal(self, key: EpisodeKey, box: str) -> MusterError | None:
        """Why a call for `box` by `key` is refused, or None. Changes nothing."""
        fence = self.fence(key.run, key.owner_epoch)
        if fence is not None:
            return fence
        found = self._boxes.get(box)
        there = found is not None and found.state is BoxState.READY
        if found is None or not there or identity(found.key) != identity(key):
            return NotFound(
                "this host has no such box for this episode",
                field="box",
                value=box,
                way_out="acquire a new box: hosts that restart lose theirs",
            )
        return None

    def living(self, run: str) -> dict[str, EpisodeKey]:
        """The boxes of a run that take calls, under the owner that used each last."""
        return {
            name: box.key
            for name, box in self._boxes.items()
            if box.key.run == run and box.state is BoxState.READY
        }

    @property
    def boxes(self) -> dict[str, EpisodeKey]:
        """Every box that exists or starts, by name."""
        return {name: box.key for name, box in self._boxes.items()}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _ask(self, event: Asked, now: float, commands: list[Command]) -> None:
        key = event.key
        self._see(key.run, key.owner_epoch, now, commands)
        if self.fence(key.run, key.owner_epoch) is not None:
            commands.append(RefuseTicket(event.ticket, True, "a newer owner epoch has spoken"))
        elif len(self._waiting) >= self._rules.waiting_max:
            problem = f"{self._rules.waiting_max} callers wait for a box already"
            commands.append(RefuseTicket(event.ticket, False, problem))
        else:
            self._waiting[event.ticket] = event

    def _see(self, run: str, epoch: int, now: float, commands: list[Command]) -> None:
        owner = self._owners.get(run)
        if owner is not None and epoch <= owner.epoch:
            return
        self._owners[run] = _Owner(epoch, now)
        self._owners.move_to_end(run)
        if owner is not None:
            commands.append(TellFormer())
        for ticket, asked in list(self._waiting.items()):
            if asked.key.run == run and asked.key.owner_epoch < epoch:
                del self._waiting[ticket]
                commands.append(RefuseTicket(ticket, True, "a newer owner epoch has spoken"))
        self._forget_runs()

    def _touch(self, key: EpisodeKey, name: str, now: float) -> None:
        """A call for a box: by the newest owner of its attempt it keeps the box, and makes it its
        own; by anybody else it does nothing."""
        box = self._boxes.get(name)
        known = box is not None and identity(box.key) == identity(key)
        if box is not None and known and self.fence(key.run, key.owner_epoch) is None:
            box.key, box.touched = key, now

    def _forget_runs(self) -> None:
        busy = {box.key.run for box in self._boxes.values()}
        for run in list(self._owners)[:-1]:
            if len(self._owners) > _RUNS_MAX and run not in busy:
                del self._owners[run]

    def _started(self, name: str, now: float, commands: list[Command]) -> None:
        box = self._boxes[name]
        box.state, box.touched = BoxState.READY, now
        if box.doomed:
            self._end(name, box.doomed, commands)

    def _end(self, name: str, why: str, commands: list[Command]) -> None:
        box = self._boxes.get(name)
        if box is None or box.state is BoxState.ENDING:
            return
        if box.state is BoxState.STARTING:
            box.doomed = why
            return
        box.state = BoxState.ENDING
        commands.append(EndBox(name, why))

    def _tick(self, now: float, commands: list[Command]) -> None:
        for name, box in list(self._boxes.items()):
            if box.state is BoxState.READY and now - box.touched > self._rules.idle_s:
                self._end(name, f"untouched for {self._rules.idle_s:g} s", commands)
            elif box.state is BoxState.READY and self._left_over(box, now):
                why = f"owner epoch {self._owners[box.key.run].epoch} has no use for it"
                self._end(name, why, commands)
        for ticket, asked in list(self._waiting.items()):
            if now >= asked.deadline:
                del self._waiting[ticket]
                problem = f"all {self._rules.boxes_max} boxes of this host stayed in use"
                commands.append(RefuseTicket(ticket, False, problem))

    def _left_over(self, box: _Box, now: float) -> bool:
        """The newest owner had its time, and never called for this box."""
        owner = self._owners.get(box.key.run)
        if owner is None or box.key.owner_epoch >= owner.epoch:
            return False
        return now - owner.since > self._rules.adopt_s

    def _fill(self, now: float, commands: list[Command]) -> None:
        starting = sum(box.state is BoxState.STARTING for box in self._boxes.values())
        while (
            self._waiting
            and len(self._boxes) < self._rules.boxes_max
            and starting < self._rules.starting_max
        ):
            ticket, asked = self._waiting.popitem(last=False)
            self._count += 1
            name = f"{self._prefix}-{self._count}"
            self._boxes[name] = _Box(asked.key, now)
            starting += 1
            commands.append(StartBox(ticket, name, asked.key))


def fenced(newest: int) -> Fenced:
    """The error of a former owner."""
    return Fenced(
        f"owner epoch {newest} of this run has spoken",
        field="owner_epoch",
        way_out="a newer router owns the run: stop",
    )


def refused(command: RefuseTicket) -> MusterError:
    """The error that a refused caller sees."""
    if command.fenced:
        return Fenced(
            command.problem, field="owner_epoch", way_out="a newer router owns the run: stop"
        )
    return Exhausted(
        command.problem, field="sandbox.boxes_max", way_out="raise it, or add a sandbox host"
    )


def start_trouble(problem: str) -> MusterError:
    """The error of a caller whose box did not start."""
    return Unavailable(
        f"the box did not start: {problem}", way_out="try again, on another host if there is one"
    )
