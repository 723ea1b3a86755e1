"""Who may fill a replica's KV cache: the rules by name.

Owns: KV-Fit and its alternatives, behind one interface. Promise: pure; under each of them a
replica with a credit and nothing but held conversations lets one of them on. Does not cover: when
the rules are asked (seats.py), orders (ranks.py).
Source: KV-Fit and the other constants from the study named in ranks.py; hold_resume's 95 % and
80 %, smallest first, are those of a published scheduler that pauses programs at tool boundaries.
"""

from __future__ import annotations

from typing import Protocol

from services.router.programs import Program, Row
from services.router.rules import RouterRules

_PRESSURE, _RESUME = 0.95, 0.80  # of the KV


class Arm(Protocol):
    """`kv`: tokens that may be filled there now; always above 0 when it is asked. The program in
    question is ranked, and not counted in the row."""

    rank: str
    moves: bool  # a held conversation may go on elsewhere
    guards: bool  # the credit is trusted less when caches are not found

    def room(self, row: Row, kv: float) -> bool:
        """Whether one more conversation may begin there."""
        ...

    def goes_on(self, program: Program, row: Row, kv: float) -> bool:
        """Whether a conversation at home there, at its boundary, samples its next turn."""
        ...

    def resumes(self, program: Program, row: Row, kv: float) -> bool:
        """The same of one that is held."""
        ...

    def takes(self, program: Program, row: Row, kv: float) -> bool:
        """Whether a conversation from elsewhere goes on there at once."""
        ...


class KvFit:
    """Only what fits beside all that outranks it goes on; nothing begins where something waits."""

    guards = True
    moves = True

    def __init__(self, rules: RouterRules):
        self.rank = rules.rank
        self._launch_fill, self._hold_fill = rules.launch_fill, rules.hold_fill

    def room(self, row: Row, kv: float) -> bool:
        """Growth included; where there is nothing yet, always: no engine is too small for one."""
        if row.held:
            return False
        return not row.ranked or row.reserved + row.reserve <= self._launch_fill * kv

    def goes_on(self, program: Program, row: Row, kv: float) -> bool:
        most = self._hold_fill * kv
        if row.load + program.context <= most:
            return True
        above = row.above(program, most - program.context)
        return above == 0 or above + program.context <= most

    resumes = goes_on

    def takes(self, program: Program, row: Row, kv: float) -> bool:
        return not row.held and row.live + program.context <= self._hold_fill * kv


class HoldResume:
    """Whoever arrives above 95 % is held; below 80 % the smallest goes on."""

    rank = "smallest_context"
    guards = False
    moves = False

    def room(self, row: Row, kv: float) -> bool:
        if row.held:
            return False
        return not row.ranked or row.live + row.reserve <= _PRESSURE * kv

    def goes_on(self, program: Program, row: Row, kv: float) -> bool:
        return row.live == 0 or row.live + program.context <= _PRESSURE * kv

    def resumes(self, program: Program, row: Row, kv: float) -> bool:
        return row.live < _RESUME * kv

    def takes(self, program: Program, row: Row, kv: float) -> bool:
        return self.goes_on(program, row, kv)


class Pressure:
    """Nothing begins above 95 %; whatever has begun goes on."""

    rank = "arrival"
    guards = False
    moves = False

    def room(self, row: Row, kv: float) -> bool:
        return not row.ranked or row.load + row.reserve <= _PRESSURE * kv

    def goes_on(self, program: Program, row: Row, kv: float) -> bool:
        return True

    resumes = goes_on
    takes = goes_on


def arm_of(rules: RouterRules) -> Arm | None:
    """That of `rules.admission`; None for "none": everybody goes on, without a seat."""
    match rules.admission:
        case "none":
            return None
        case "kv_fit":
            return KvFit(rules)
        case "hold_resume":
            return HoldResume()
        case "pressure":
            return Pressure()
    raise KeyError(rules.admission)
