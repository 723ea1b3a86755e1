"""The steps of one box by turn: run once, repeat the kept answer, or refuse. Pure.

Promise: no turn runs twice; a turn that is running is waited for; a turn below the newest that
never ran is refused, for what would have followed it has happened already. A caller whose records
name another newest turn than ran here is told that this box is not theirs: nothing runs, and
nothing is judged, on top of effects that no record explains.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum

from muster.errors import Exhausted, InvalidInput, NotFound, Refused
from muster.types import StepLimit, Value
from services.sandbox.box import Evidence, KeptStep


class StepRecord(Value, frozen=True):
    """What is kept of a step, and answered to every repeat of its call."""

    command: str
    evidence: Evidence
    limit: StepLimit


class Decision(Enum):
    """What to do with a call."""

    RUN = "run"
    WAIT = "wait"  # the same step is running
    REPEAT = "repeat"  # its answer is kept


class Ledger:
    """One box's steps; keeps the newest `kept_max` answers, refuses beyond `steps_max` steps."""

    def __init__(self, steps_max: int = 512, kept_max: int = 16, newest: int = -1):
        """newest: the turn that ran last in the box whose files this one goes on from."""
        self._steps_max, self._kept_max = steps_max, kept_max
        self._kept: OrderedDict[int, StepRecord] = OrderedDict()
        self._running: tuple[int, str] | None = None
        self._newest = newest
        self._count = newest + 1  # turns count up from 0
        self.closed = ""  # why no further step may run

    def restore(
        self, kept: Iterable[KeptStep], running: tuple[int, str] | None, newest: int
    ) -> None:
        """Go on where a former service was: what its box tells of its steps."""
        for step in kept:
            self._running, self._newest = (step.turn, step.command), step.turn
            self.finish(step.evidence)
        self._running = running
        self._newest = max(self._newest, newest, running[0] if running else -1)
        self._count = self._newest + 1

    def decide(self, turn: int, command: str, after: int | None = None, box: str = "") -> Decision:
        """What to do with a call. `after`: see `check`.

        Raises InvalidInput, Refused or Exhausted of field `turn`, NotFound of field `box`.
        """
        if turn < 0:
            raise InvalidInput("a turn is 0 or more", field="turn", value=turn, way_out="count up")
        running = self._running is not None and self._running[0] == turn
        if (turn, command) == self._running:
            return Decision.WAIT
        if turn in self._kept and self._kept[turn].command == command:
            return Decision.REPEAT
        self.check(after, box)
        if running or turn in self._kept:
            raise Refused(
                "this turn ran another command",
                field="turn",
                value=turn,
                way_out="use the next turn for another command",
            )
        if self.closed:
            raise Refused(
                f"no step can run: {self.closed}",
                field="turn",
                value=turn,
                way_out="acquire a new box",
            )
        if self._running or turn <= self._newest:
            raise Refused(
                f"turn {self._newest} has begun already",
                field="turn",
                value=turn,
                way_out="run turns in order, one at a time; a lost one cannot be made up",
            )
        if self._count >= self._steps_max:
            raise Exhausted(
                f"a box runs at most {self._steps_max} steps",
                field="sandbox.steps_max",
                value=self._steps_max,
                way_out="raise it, or end the episode",
            )
        return Decision.RUN

    def check(self, after: int | None, box: str) -> None:
        """Raises NotFound when another turn than `after` ran last here (-1: none ran).

        None, of a caller that keeps no records, is right about every box.
        """
        if after is not None and after != self._newest:
            raise NotFound(
                f"turn {self._newest} ran last in this box, turn {after} by the caller's records",
                field="box",
                value=box,
                way_out="rebuild it: acquire a fresh box and run the recorded commands again",
            )

    @property
    def newest(self) -> int:
        """The newest turn that began; -1 before the first."""
        return self._newest

    def begin(self, turn: int, command: str) -> None:
        self._running, self._newest = (turn, command), turn
        self._count += 1

    def finish(self, evidence: Evidence) -> StepRecord:
        """The running step ended; its record."""
        if self._running is None:
            raise ValueError("no step is running")
        turn, command = self._running
        record = StepRecord(command, evidence, which_limit(evidence))
        self._running = None
        self._kept[turn] = record
        while len(self._kept) > self._kept_max:
            self._kept.popitem(last=False)
        if evidence.broken:
            self.closed = f"the box is broken ({evidence.broken})"
        return record

    def lose(self, why: str) -> None:
        """The running step's result will never be known: it stays begun, and no other may run."""
        self.closed = why

    def kept(self, turn: int) -> StepRecord:
        """The answer of a step that `decide` said to repeat."""
        return self._kept[turn]


def which_limit(evidence: Evidence) -> StepLimit:
    """The limit that ended a step. A step that succeeded was ended by none."""
    if evidence.timed_out:
        return StepLimit.TIME
    if evidence.exit_code == 0:
        return StepLimit.NONE
    if evidence.oom_kills:
        return StepLimit.MEMORY
    if evidence.pids_refused:
        return StepLimit.PIDS
    return StepLimit.DISK if evidence.disk_full else StepLimit.NONE
