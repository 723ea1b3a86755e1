"""Which box may exist, for whom, and when it has to go. Pure.

Owns: every box of this host by its state, the callers waiting for one, the newest owner epoch of
each run. Promise: never more than `boxes_max` boxes, `starting_max` starts nor `building_max`
set-ups at once; callers are served in the order in which their attempts began to wait, but for
those whose set-up has to be made first, and none waits past its deadline. One set-up is made for
all callers that wait for the same content. Boxes stand ready for callers to come (`warm_max`); each
is used once, and none keeps a caller waiting: it ends first. A box belongs to an attempt, not to an
epoch: when a newer owner speaks, older ones are refused and the boxes live on; a call of the newest
owner makes a box its own, and one that it does not use within `adopt_s` of its first word ends, as
does one that was taken over from a former service and is not used. A box that nobody touches for
`idle_s` ends. None ends so while something runs in it, which counts as a touch when it is over.
Does not cover: what a box is (box.py), its steps (ledger.py), how many are wanted (warm.py), who is
before whom (waiting.py).
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from muster.errors import Fenced, MusterError, NotFound
from muster.types import EpisodeKey
from services.sandbox.events import (
    Adopted,
    Asked,
    BuildFailed,
    Built,
    Claimed,
    Command,
    Dropped,
    EndBox,
    Ended,
    Event,
    FoundDead,
    GaveUp,
    Handed,
    HandOver,
    Known,
    RefuseTicket,
    Released,
    Resized,
    Rested,
    RunSetup,
    Spoke,
    StartBox,
    Started,
    StartFailed,
    StartWarm,
    TellFailure,
    TellFormer,
    Ticked,
    Working,
    identity,
)
from services.sandbox.owners import Owners
from services.sandbox.places import BoxState, Place, Places, PoolRules
from services.sandbox.waiting import Waiting
from services.sandbox.warm import Demand, Kind

_WARM_PAUSE_S = 5.0  # after a start for nobody that failed, or a warm box that died
__all__ = ["BoxState", "Pool", "PoolRules", "identity"]


class Pool:
    """The machine; `prefix` makes box names unique across restarts of the host."""

    def __init__(self, rules: PoolRules, prefix: str = "box"):
        self._boxes = Places(rules, prefix)
        self._waiting = Waiting()
        self._owners = Owners()
        self._demand = Demand()
        self._set_up: set[str] = set()  # contents that have a snapshot
        self._warm_again = 0.0  # no box is started for nobody before then

    def handle(self, event: Event, now: float) -> list[Command]:
        """One event in, commands out, in the order in which they are to be begun."""
        commands: list[Command] = []
        if not self._of_box(event, now, commands):
            self._of_callers(event, now, commands)
        short = self._serve(now, commands)
        self._make_way(short, commands)
        if not short and not isinstance(event, Spoke):
            self._warm_up(now, commands)
        return commands

    def _of_callers(self, event: Event, now: float, commands: list[Command]) -> None:
        match event:
            case Asked():
                self._ask(event, now, commands)
            case GaveUp(ticket):
                self._waiting.drop(ticket)
            case Spoke(key, name):
                self._see(key.run, key.owner_epoch, now, commands)
                self._touch(key, name, now)
            case Claimed(run, epoch):
                self._see(run, epoch, now, commands)
            case Known(content):
                self._set_up.add(content)
            case Dropped(content):
                self._drop(content, commands)
            case Resized(boxes_max, warm_max):
                self._boxes.resize(boxes_max, warm_max)
            case Ticked():
                self._tick(now, commands)

    def _of_box(self, event: Event, now: float, commands: list[Command]) -> bool:
        """Whether it is news of one box; its state follows."""
        match event:
            case Started(name, took_s):
                self._started(name, took_s, now, commands)
            case Handed(name):
                self._own(name, now, commands)
            case FoundDead(name):
                self._found_dead(name, now, commands)
            case Built(name) | BuildFailed(name):
                self._set_up_over(name, isinstance(event, Built), commands)
            case Adopted(name, key):
                self._adopt(name, key, now, commands)
            case Working(name) | Rested(name):
                self._work(name, 1 if isinstance(event, Working) else -1, now)
            case StartFailed(name) | Ended(name):
                self._gone(name, now)
            case Released(name):
                self._end(name, "released", commands)
            case _:
                return False
        return True

    # What may be known ---------------------------------------------------------------------

    def fence(self, run: str, owner_epoch: int) -> Fenced | None:
        """Why an owner is refused, or None. Changes nothing."""
        return self._owners.fence(run, owner_epoch)

    def refusal(self, key: EpisodeKey, box: str) -> MusterError | None:
        """Why a call for `box` by `key` is refused, or None. Changes nothing."""
        fence = self.fence(key.run, key.owner_epoch)
        if fence is not None:
            return fence
        found = self._boxes.get(box)
        there = found is not None and found.state is BoxState.READY
        if found is None or not there or found.key is None or identity(found.key) != identity(key):
            return NotFound(
                "this host has no such box for this episode",
                field="box",
                value=box,
                way_out="acquire a new box: hosts that restart may lose theirs",
            )
        return None

    def living(self, run: str) -> dict[str, EpisodeKey]:
        """The boxes of a run that take calls, under the owner that used each last."""
        return {
            name: box.key
            for name, box in self._boxes.items()
            if box.key is not None and box.key.run == run and box.state is BoxState.READY
        }

    @property
    def boxes(self) -> dict[str, EpisodeKey | None]:
        """Every box that exists or starts, by name; None for one that is nobody's."""
        return {name: box.key for name, box in self._boxes.items()}

    @property
    def states(self) -> dict[str, BoxState]:
        return {name: box.state for name, box in self._boxes.items()}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def rules(self) -> PoolRules:
        return self._boxes.rules

    # Callers -------------------------------------------------------------------------------

    def _ask(self, event: Asked, now: float, commands: list[Command]) -> None:
        key = event.key
        self._see(key.run, key.owner_epoch, now, commands)
        if self.fence(key.run, key.owner_epoch) is not None:
            commands.append(RefuseTicket(event.ticket, True, "a newer owner epoch has spoken"))
        elif len(self._waiting) >= self.rules.waiting_max:
            problem = f"{self.rules.waiting_max} callers wait for a box already"
            commands.append(RefuseTicket(event.ticket, False, problem))
        else:
            self._waiting.add(event)
            if event.kind is not None:
                self._demand.asked(event.kind, key, now)

    def _see(self, run: str, epoch: int, now: float, commands: list[Command]) -> None:
        if not self._owners.is_news(run, epoch):
            return
        if self._owners.hear(run, epoch, now, self._boxes.runs) is not None:
            commands.append(TellFormer())
        for asked in self._waiting:
            if asked.key.run == run and asked.key.owner_epoch < epoch:
                self._waiting.drop(asked.ticket)
                commands.append(RefuseTicket(asked.ticket, True, "a newer owner epoch has spoken"))

    def _touch(self, key: EpisodeKey, name: str, now: float) -> None:
        """A call for a box: by the newest owner of its attempt it keeps the box, and makes it its
        own; by anybody else it does nothing."""
        box = self._boxes.get(name)
        if box is None or box.key is None or identity(box.key) != identity(key):
            return
        if self.fence(key.run, key.owner_epoch) is None:
            box.key, box.touched, box.adopted = key, now, False

    # Boxes ---------------------------------------------------------------------------------

    def _started(self, name: str, took_s: float, now: float, commands: list[Command]) -> None:
        box = self._boxes[name]
        if box.kind is not None:
            self._demand.made(box.kind, took_s)
        if box.key is None and not box.doomed:
            box.state, box.touched = BoxState.WARM, now
        else:
            self._own(name, now, commands)

    def _own(self, name: str, now: float, commands: list[Command]) -> None:
        """A box is its caller's from now on, or ends if the caller has gone."""
        box = self._boxes[name]
        box.state, box.touched, box.asked = BoxState.READY, now, None
        if box.doomed:
            self._end(name, box.doomed, commands)

    def _found_dead(self, name: str, now: float, commands: list[Command]) -> None:
        box = self._boxes[name]
        if box.asked is not None and box.key is not None and not box.doomed:
            # Under the newest owner that asked for it meanwhile.
            self._waiting.add(replace(box.asked, key=box.key))
        box.state, box.key, box.asked = BoxState.ENDING, None, None
        self._warm_again = now + _WARM_PAUSE_S  # what kills one may kill the next
        commands.append(EndBox(name, "it did not answer"))

    def _gone(self, name: str, now: float) -> None:
        box = self._boxes.pop(name, None)
        if box is not None and box.key is None and box.state is BoxState.STARTING:
            self._warm_again = now + _WARM_PAUSE_S

    def _set_up_over(self, name: str, made: bool, commands: list[Command]) -> None:
        content = self._boxes.pop(name).content
        if made:
            self._set_up.add(content)
            return
        for asked in self._waiting:
            if asked.kind is not None and asked.kind.content == content:
                self._waiting.drop(asked.ticket)
                commands.append(TellFailure(asked.ticket, name))

    def _drop(self, content: str, commands: list[Command]) -> None:
        """The next set-up of the content may leave another state: no box of this one is handed
        over beside it."""
        self._set_up.discard(content)
        for name in self._boxes.spare:
            kind = self._boxes[name].kind
            if kind is not None and kind.set_up and kind.content == content:
                self._end(name, "its snapshot is gone", commands)

    def _work(self, name: str, more: int, now: float) -> None:
        box = self._boxes.get(name)
        if box is not None:
            box.working, box.touched = box.working + more, now

    def _adopt(self, name: str, key: EpisodeKey, now: float, commands: list[Command]) -> None:
        self._see(key.run, key.owner_epoch, now, commands)
        box = self._boxes[name] = Place(BoxState.READY, now, None)
        box.key, box.adopted = key, True

    def _end(self, name: str, why: str, commands: list[Command]) -> None:
        box = self._boxes.get(name)
        if box is None or box.state is BoxState.ENDING:
            return
        if box.state in (BoxState.STARTING, BoxState.HANDING, BoxState.BUILDING):
            box.doomed = why
            return
        box.state = BoxState.ENDING
        commands.append(EndBox(name, why))

    def _tick(self, now: float, commands: list[Command]) -> None:
        for name, box in list(self._boxes.items()):
            if box.state is BoxState.READY and (why := self._unused(box, now)):
                self._end(name, why, commands)
            elif box.state is BoxState.WARM and now - box.touched > self.rules.warm_idle_s:
                self._end(name, "nobody asked for it", commands)
        for asked in self._waiting:
            if now >= asked.deadline:
                self._waiting.drop(asked.ticket)
                problem = f"all {self.rules.boxes_max} boxes of this host stayed in use"
                commands.append(RefuseTicket(asked.ticket, False, problem))

    def _unused(self, box: Place, now: float) -> str:
        """Why a box in use should go, or nothing."""
        idle, adopt = self.rules.idle_s, self.rules.adopt_s
        if box.working:
            return ""
        if now - box.touched > idle:
            return f"untouched for {idle:g} s"
        if box.adopted and now - box.touched > adopt:
            return f"taken over and untouched for {adopt:g} s"
        owner = self._owners.of(box.key.run) if box.key is not None else None
        if owner is None or box.key is None or box.key.owner_epoch >= owner.epoch:
            return ""
        late = now - owner.since > adopt  # it had its time, and never called for this box
        return f"owner epoch {owner.epoch} has no use for it" if late else ""

    # Places --------------------------------------------------------------------------------

    def _serve(self, now: float, commands: list[Command]) -> int:
        """Begin what callers wait for, in order; how many of them lack nothing but a place."""
        if not self._waiting:
            return 0
        coming, setups = self._boxes.coming, self._boxes.setups
        starting = self._boxes.count(BoxState.STARTING)
        spare, short = bool(self._boxes.spare), 0
        for asked in self._waiting:
            kind, room = asked.kind, self._boxes.room
            if not spare and not room:
                return short + 1
            if kind is not None and spare and (name := self._boxes.warm(kind)):
                self._hand(name, asked, commands)
            elif coming[kind] > 0:
                coming[kind] -= 1  # sooner than one that would begin now
            elif kind is not None and kind.set_up and kind.content not in self._set_up:
                if kind.content in setups or len(setups) >= self.rules.building_max:
                    continue
                setups.add(kind.content)
                short += self._set_up_first(asked.ticket, kind, now, commands)
            elif starting < self.rules.starting_max:
                starting += room
                short += self._start(asked, now, commands)
        return short

    def _hand(self, name: str, asked: Asked, commands: list[Command]) -> None:
        box = self._boxes[name]
        box.state, box.key, box.asked = BoxState.HANDING, asked.key, asked
        self._waiting.drop(asked.ticket)
        commands.append(HandOver(asked.ticket, name, asked.key))

    def _set_up_first(self, ticket: int, kind: Kind, now: float, commands: list[Command]) -> int:
        """1 when there is no place for it."""
        if not self._boxes.room:
            return 1
        name = self._boxes.take(BoxState.BUILDING, now, kind)
        commands.append(RunSetup(name, kind, ticket))
        return 0

    def _start(self, asked: Asked, now: float, commands: list[Command]) -> int:
        """1 when there is no place for it."""
        if not self._boxes.room:
            return 1
        name = self._boxes.take(BoxState.STARTING, now, asked.kind)
        self._boxes[name].key = asked.key
        self._waiting.drop(asked.ticket)
        commands.append(StartBox(asked.ticket, name, asked.key))
        return 0

    def _make_way(self, short: int, commands: list[Command]) -> None:
        """End as many spare boxes as callers lack places, and those above the bounds."""
        spare = self._boxes.spare
        lacking = short + max(len(self._boxes) - self.rules.boxes_max, 0)
        if lacking:
            lacking -= sum(box.leaving for box in self._boxes.values())
        surplus = max(lacking, len(spare) - self.rules.warm_max, 0)
        for name in spare[:surplus]:
            self._end(name, "it gives way", commands)

    def _give_way(self, wanted: Collection[Kind], commands: list[Command]) -> None:
        """End a warm box that nobody is expected to ask for: the next one takes its place."""
        for name in self._boxes.spare:
            box = self._boxes[name]
            if box.state is BoxState.WARM and box.kind not in wanted:
                self._end(name, "others are asked for", commands)
                return

    def _warm_up(self, now: float, commands: list[Command]) -> None:
        """Start boxes for callers to come, leaving a start free for one that comes now."""
        if now < self._warm_again or not self.rules.warm_max:
            return
        wanted = self._demand.wanted(now)
        spare = [self._boxes[name].kind for name in self._boxes.spare]
        starting = self._boxes.count(BoxState.STARTING)
        for kind, count in wanted.items():
            if kind.set_up and kind.content not in self._set_up:
                continue
            for _ in range(count - spare.count(kind)):
                if len(spare) >= self.rules.warm_max:
                    self._give_way(wanted, commands)
                    return
                if starting >= max(1, self.rules.starting_max - 1) or not self._boxes.room:
                    return
                spare.append(kind)
                starting += 1
                commands.append(StartWarm(self._boxes.take(BoxState.STARTING, now, kind), kind))
