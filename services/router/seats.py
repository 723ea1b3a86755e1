"""Who may generate now: each conversation's seat in a replica's KV cache.

Owns: the programs, the credits, what is held and since when, moves between replicas. Promise: pure;
nothing new goes on without an unexpired credit; a held conversation goes on as soon as its arm lets
it (KV-Fit: the best-ranked of a replica always fits), and one held for `fair_hold_s` is the first;
nobody is held for longer than `wedge_s` by a home that takes no turn.
Does not cover: the rules (arms.py), which sibling is launched next (order.py), calls (driver.py).

KV-Fit as a state machine is the study's (ranks.py): launch, ready, turn_end, over, settle.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.router.arms import Arm
from services.router.costs import Costs
from services.router.credits import Credit
from services.router.programs import Program, Row, State
from services.router.rooms import Admits, Rooms, Why
from services.router.rules import RouterRules


class Seats(Rooms):
    """Of all replicas."""

    def __init__(
        self, rules: RouterRules, arm: Arm, admits: Admits, welcomes: Admits, *, steers: bool
    ):
        """`steers`: seats choose replicas; otherwise a placement policy does, by `at`."""
        super().__init__(rules, arm, admits, welcomes)
        self._steers, self.patient_until = steers, 0.0
        self._costs = Costs.of(rules)
        self._programs: dict[str, Program] = {}
        self._groups: dict[str, int] = {}  # group → order of its first launch, while it has seats
        self._seated: dict[str, int] = {}  # group → programs
        self._count = 0
        self._aging: dict[str, Program] = {}  # held ones, the longest first
        self._homeless: list[str] = []  # were held where nothing is any more

    # -- replicas ----------------------------------------------------------------------

    def told(self, replica: str, tokens: int, until: float, *, anew: bool) -> None:
        """It granted `tokens` until `until`; `anew`: its cache is another one than before."""
        self._credits.setdefault(replica, Credit()).told(tokens, until, anew=anew)
        if replica not in self._rows:
            self._row(replica)
            for program in self._programs.values():
                if program.wish == replica:
                    self._returns(program)
        if anew:
            self.cleared(replica)
        self._news(replica)

    def admitted(self, replica: str) -> None:
        """It takes turns now."""
        self._news(replica)

    def cleared(self, replica: str) -> None:
        """Its cache is empty: nothing is lost by leaving it."""
        row = self._rows.get(replica)
        for _, program in row.ranked if row is not None else ():
            program.kept = 0

    def lost(self, replica: str) -> None:
        """Its conversations have no home any more."""
        row = self._rows.pop(replica, None)
        self._credits.pop(replica, None)
        self._changed.discard(replica)
        self._roomy.discard(replica)
        for _, program in row.ranked if row is not None else ():
            self._unhouse(program)

    def _unhouse(self, program: Program) -> None:
        """Its row is gone, or counts it no more."""
        self._aging.pop(program.id, None)
        if program.state is State.HELD:
            program.state, program.waited = State.TOOL, True
            self._homeless.append(program.id)
        program.home, program.kept = "", 0
        program.granted = program.straight = False

    # -- programs ----------------------------------------------------------------------

    def launch(self, id_: str, group: str, context: int, now: float) -> bool:
        """Give a new conversation the emptiest home that has room; False when none has."""
        best = self._emptiest(now, context)
        if best:
            program = self._enrolled(id_, group, context, best)
            program.weighed = self._given(best)
            self._rows[best].put(program)
        return bool(best)

    def adopt(self, id_: str, group: str, context: int, wish: str) -> None:
        """Go on with one that a former router launched; its KV may lie at `wish`."""
        program = self._enrolled(id_, group, context, "")
        program.state, program.wish = State.TOOL, wish
        if wish in self._rows:
            self._returns(program)

    def _returns(self, program: Program) -> None:
        """To where its KV lies."""
        self._move(program, program.wish)
        program.kept = program.context

    def _enrolled(self, id_: str, group: str, context: int, home: str) -> Program:
        self._count += 1
        number = self._groups.setdefault(group, self._count)
        self._seated[group] = self._seated.get(group, 0) + 1
        program = Program(id_, group, self._count, number, context, home)
        self._programs[id_] = program
        return program

    def ready(self, id_: str, context: int, now: float, *, leave: bool = False) -> str:
        """It could sample its next turn: its home when it may, "" when it is held or has none.

        `context`: tokens of the prompt. `leave`: its home just failed it.
        """
        program = self._programs[id_]
        # Where room is found for many at once, `settle` lets them on in their order; asked one by
        # one from the lowest rank on, each would go on beside all before it.
        goes_on = self._arm.goes_on if program.home else self._arm.takes
        if not self._at_home(program, now, leave=leave):
            return ""
        home = program.home
        row, granted = self._rows[home], program.granted
        kv = self._open(home, now)
        row.take(program)
        program.context, program.granted = context, False
        row.ranks(program)
        if granted or (kv and goes_on(program, row, kv)):
            self._aging.pop(id_, None)
            program.state, program.since, program.waited = State.GEN, now, False
            row.put(program)
            return home
        if program.state is not State.HELD:
            if not program.hold:
                program.hold = row.hold_terms(program, kv, now)
            self._hold(program, now)
        row.put(program)
        self._changed.add(home)
        return ""

    def _hold(self, program: Program, now: float) -> None:
        """It waits from now on, or still if it did when its home was lost."""
        program.state, program.straight = State.HELD, False
        if not program.waited:
            program.since = now
        self._aging[program.id] = program
        if program.waited:
            ordered = sorted(self._aging.values(), key=lambda one: one.since)
            self._aging = {one.id: one for one in ordered}

    def at(self, id_: str, replica: str) -> None:
        """A policy chose this replica for its next turn: its home is there."""
        program = self._programs[id_]
        if program.home != replica:
            self._move(program, replica)

    @property
    def slack(self) -> bool:
        """Whether balance alone decides where conversations go: nothing is held anywhere."""
        return self._arm.moves and not any(row.held for row in self._rows.values())

    def rather(self, id_: str, replica: str, now: float) -> None:
        """A policy would have it there: it moves if it goes on there at once."""
        program, row = self._programs[id_], self._rows.get(replica)
        kv = self._kv(replica, now)
        if row is None or not kv or program.granted or program.state is State.HELD:
            return
        if self._arm.takes(program, row, kv) and self._welcomes(replica, now):
            self._move(program, replica)

    def turn_end(self, id_: str, prompt: int, sampled: int, cached: int, now: float) -> None:
        """Its reply came: of `prompt` tokens the engine had found `cached` in its cache."""
        program = self._programs.get(id_)
        if program is None or not program.home:
            return
        if self._arm.guards:
            lacked = max(0, min(program.kept, prompt) - cached) if program.straight else 0
            self._credits[program.home].found(lacked)
        program.aged, program.since = False, now
        program.kept, program.straight = prompt + sampled, True
        row = self._rows[program.home]
        row.take(program)
        program.state, program.context = State.TOOL, prompt + sampled
        row.put(program)
        if row.held:  # it only grew: there is no more room for a new one than before
            self._changed.add(program.home)

    def over(self, id_: str) -> tuple[str, ...]:
        """It samples no more. Answers those whose caches had better be touched, in order.

        A large dead cache would outlive those that wait for their tools, for it was used last.
        """
        program = self._programs.pop(id_, None)
        if program is None:
            return ()
        self._aging.pop(id_, None)
        if self._growth.ended(program.context):
            self._regrown()
        left = self._seated[program.group] = self._seated[program.group] - 1
        if not left:
            del self._seated[program.group], self._groups[program.group]
        if not program.home:
            return ()
        row = self._rows[program.home]
        row.take(program)
        self._news(program.home)
        least = self._rules.keepalive_tokens
        if not least or program.kept < least or not self._arm.guards:
            return ()
        return tuple(other.id for other in row.tools.values() if other.kept)

    def holds(self, id_: str) -> bool:
        """Whether it is held for want of KV."""
        program = self._programs.get(id_)
        return program is not None and program.state is State.HELD

    def granted(self, id_: str) -> bool:
        """Whether it was held and let on, and has not sampled since."""
        return self._programs[id_].granted

    def why_held(self, id_: str, now: float, why: Why) -> tuple[str, str]:
        """For people: what a held one lacks, and who goes first there ("" when nobody does).
        `why`: what keeps a replica from taking turns beside its KV."""
        program = self._programs[id_]
        home = program.home
        row, kv = self._rows[home], self._kv(home, now)
        reason = why(home, now)
        if not kv or reason:
            reason = reason or f"{home} grants no room in its KV cache"
            return f"{home}, its home, which takes no turn now ({reason})", ""
        first = row.ranked[0][1]
        queue = [held for _, held in row.held].index(program)
        told = (
            f"room in the KV cache of {home}: it needs {program.context:,} tokens, others fill "
            f"{row.live:,} of {kv:,.0f}"
        )
        if self._rules.admission == "kv_fit":
            told += f" (at most {100 * self._rules.hold_fill:.0f} % may be filled)"
        if queue:
            told += f" and {queue} held there go{'es' * (queue == 1)} first"
        told += "; it goes on when one of them ends or has to wait itself"
        return told, first.id if first is not program else ""

    def launched(self, id_: str) -> tuple[str, dict[str, float]]:
        """Its home, and what the replicas with room had given away when it got it."""
        program = self._programs.get(id_)
        return (program.home, program.weighed) if program is not None else ("", {})

    def hold_over(self, id_: str, now: float) -> dict[str, float]:
        """Its turn begins: why it was held before that, and for how long; {} when it was not."""
        program = self._programs[id_]
        terms = program.hold
        if terms:
            program.hold = {}
            terms["held_s"] = now - terms.pop("since")
        return terms

    def seated(self, id_: str) -> bool:
        return id_ in self._programs

    def home(self, id_: str) -> str:
        """Its home, "" without one."""
        program = self._programs.get(id_)
        return program.home if program is not None else ""

    def kept(self, id_: str) -> int:
        """Tokens of it that lie in its home's cache, as far as is known."""
        program = self._programs.get(id_)
        return program.kept if program is not None else 0

    # -- going on ----------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether anything has happened by which somebody held might go on."""
        return bool(self._changed or self._homeless)

    def settle(self, now: float) -> list[str]:
        """Those that are asked again: let on, or without a home; until nothing has `changed`."""
        changed, self._changed = sorted(self._changed), set()
        released = [id_ for id_ in self._homeless if id_ in self._programs]
        self._homeless = []
        for replica in changed:
            row = self._rows.get(replica)
            if row is not None and row.held:
                self._settle(replica, row, now, released)
        return released

    def _settle(self, replica: str, row: Row, now: float, released: list[str]) -> None:
        kv = self._open(replica, now)
        while row.held:
            program = row.held[0][1]
            row.take(program)
            home = replica
            if not (kv and self._arm.resumes(program, row, kv)):
                home = self._elsewhere(program, now)
            if home:
                self._aging.pop(program.id, None)
                program.state, program.since, program.granted = State.GEN, now, True
                program.waited = False
                if home != replica:
                    program.home, program.kept = home, 0
                    self._news(replica)
                released.append(program.id)
            self._rows[home or replica].put(program)
            if not home:
                return
        self._roomy.add(replica)

    def every(self, now: float) -> None:
        """Time passed: credits ended or came back, someone waits for too long."""
        for program in list(self._aging.values()):
            if now - program.since < self._rules.fair_hold_s:
                break
            del self._aging[program.id]
            self._row(program.home).take(program)
            program.aged = True
            self._row(program.home).put(program)
        for replica, row in self._rows.items():
            if self._open(replica, now):
                row.closed_since = None
            elif row.closed_since is None:
                row.closed_since = now
            elif now - row.closed_since >= self._rules.wedge_s:
                self._leave(row)
            if row.held:
                self._news(replica)
        self._roomy.update(self._rows)

    def _leave(self, row: Row) -> None:
        """Nobody knows whether it takes turns ever again: go on elsewhere, whatever the price."""
        for _, program in list(row.held):
            row.take(program)
            self._unhouse(program)

    def _elsewhere(self, program: Program, now: float) -> str:
        """Where a held one goes on at once, at a price that is worth it; "" for nowhere."""
        dear = self._costs.prefill_s(program.context) > self._rules.migrate_prefill_s
        if not self._arm.moves or not self._steers or (program.kept and dear):
            return ""
        return self._taker(program, now)

    def _taker(self, program: Program, now: float) -> str:
        best, least = "", 0
        for replica, row in self._rows.items():
            if replica == program.home or (best and row.live >= least):
                continue
            kv = self._kv(replica, now)
            if kv and self._arm.takes(program, row, kv) and self._welcomes(replica, now):
                best, least = replica, row.live
        return best

    def _at_home(self, program: Program, now: float, *, leave: bool) -> bool:
        """Whether it has a home; one that takes turns is found for it if there is any."""
        if program.home:  # also one that takes no turn now: it is well again soon, or is lost
            if self._steers and (leave or not program.kept):
                self._rather(program, now, leave=leave)
            return True
        if program.wish and now < self.patient_until:
            return False
        program.wish = ""
        other = self._taker(program, now)
        if not other:
            able = [r for r in self._rows if self._open(r, now)]
            other = min(able, key=lambda r: (self._rows[r].load, r), default="")
        if other:
            self._move(program, other)
        return bool(other)

    def _rather(self, program: Program, now: float, *, leave: bool) -> None:
        """Move it from a home that failed it, if that is cheap; with a cold cache, for balance."""
        other = self._elsewhere(program, now)
        if not other:
            return
        there, here = self._rows[other], self._rows[program.home]
        if program.state is State.BOOT:  # seats were given before every replica was admitted
            balanced = there.reserved + self._growth.tokens < here.reserved
        else:
            balanced = there.live + program.context < here.live
        if leave or balanced:
            self._move(program, other)

    # -- bookkeeping -------------------------------------------------------------------

    def _move(self, program: Program, replica: str) -> None:
        if program.home:
            self._rows[program.home].take(program)
            self._news(program.home)
        program.home, program.kept, program.straight = replica, 0, False
        program.wish = ""
        self._row(replica).put(program)

    def programs(self) -> Iterable[Program]:
        return self._programs.values()
