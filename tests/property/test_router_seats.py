"""Seats under random launches, takeovers, turns, ends, credits and losses, against sums made anew.

What is checked at each step: the kept sums and orders are those of the programs; an answer is what
the rules of KV-Fit say of them; after settling nobody who could go on is held, and nobody is held
for long by a replica that takes no turn, lost or not. At the end all replicas take turns, or all
but one, which is never lost: then everything held goes on and ends.
"""

from __future__ import annotations

import os
import random

import pytest

from services.router.arms import arm_of
from services.router.programs import Program, State
from services.router.rules import RouterRules
from services.router.seats import Seats

SEEDS = int(os.environ.get("MUSTER_TEST_EXAMPLES", "90")) // 3
STEPS, REPLICAS = 300, ("r0", "r1", "r2")
KV, RESERVE, FILL, WEDGE_S = 100_000, 4000, 0.97, 8.0


class Books:
    """Drives seats and does every sum again."""

    def __init__(self, seed: int, admission: str, rank: str):
        self.chance = random.Random(seed)
        self.rules = RouterRules(
            run="r",
            owner_epoch=1,
            admission=admission,
            rank=rank,
            reserve_tokens=RESERVE,
            fair_hold_s=self.chance.choice([5.0, 1e9]),
            keepalive_tokens=self.chance.choice([0, 5000]),
            migrate_prefill_s=self.chance.choice([0.05, 0.5, 6.0]),
            wedge_s=WEDGE_S,
        )
        arm = arm_of(self.rules)
        assert arm is not None
        self.arm = arm
        self.up = set(REPLICAS)
        self.credits: dict[str, tuple[int, float]] = {}
        self.now, self.made = 0.0, 0
        self.closed: str = self.chance.choice(["", REPLICAS[0]])  # takes no turn at the end
        self.doing: dict[str, str] = {}  # id → box, wait, gen or tool
        self.size: dict[str, int] = {}
        self.ended: set[str] = set()
        self.admits = lambda r, _: r in self.up and self.credit(r) > 0
        self.seats = Seats(self.rules, arm, self.admits, self.admits, steers=True)
        for replica in REPLICAS:
            self.grant(replica)

    def credit(self, replica: str) -> int:
        tokens, until = self.credits.get(replica, (0, 0.0))
        return tokens if self.now < until else 0

    def grant(self, replica: str, *, anew: bool = False) -> None:
        ttl = self.chance.choice([3.0, 30.0])
        self.credits[replica] = (KV, self.now + ttl)
        self.seats.told(replica, KV, self.now + ttl, anew=anew)

    # -- what the rules say, from scratch ------------------------------------------------

    def at(self, replica: str) -> list[Program]:
        return [p for p in self.seats.programs() if p.home == replica]

    def key(self, program: Program) -> tuple[float, ...]:
        if program.aged:
            return (0, program.since, program.number)
        if self.rules.admission == "kv_fit" and self.rules.rank == "largest_context":
            return (1, -program.context, program.number)
        return program.key

    def fits(self, program: Program) -> bool:
        """KV-Fit's rule."""
        kv = self.credit(program.home) * self.seats._credits[program.home].trust
        above = sum(p.context for p in self.at(program.home) if self.key(p) < self.key(program))
        return kv > 0 and (above == 0 or above + program.context <= FILL * kv)

    def displaces_nobody(self, program: Program) -> bool:
        there = self.at(program.home)
        kv = self.credit(program.home) * self.seats._credits[program.home].trust
        full = sum(p.context for p in there) > FILL * kv
        return not full and not any(p.state is State.HELD for p in there)

    def check(self) -> None:
        for replica, row in self.seats._rows.items():
            there = self.at(replica)
            ranked = sorted(there, key=self.key)
            assert [p for _, p in row.ranked] == ranked
            assert [p for _, p in row.held] == [p for p in ranked if p.state is State.HELD]
            assert row.load == sum(p.context for p in there)
            assert row.live == sum(p.context for p in there if p.state is not State.HELD)
            assert row.reserved == sum(max(p.context, self.seats.reserve) for p in there)
            assert 0 <= self.seats.reserve <= RESERVE
            assert set(row.tools) == {p.id for p in there if p.state is State.TOOL}
        assert {p.id for p in self.seats.programs()} == set(self.doing)
        held = {p.id for p in self.seats.programs() if p.state is State.HELD}
        aged = {p.id for p in self.seats.programs() if p.aged}
        assert held - aged == set(self.seats._aging) - aged
        assert held <= {id_ for id_, does in self.doing.items() if does == "wait"}

    def check_settled(self) -> None:
        if self.rules.admission != "kv_fit":
            return
        for row in self.seats._rows.values():
            best = row.held[0][1] if row.held else None
            if best is not None and self.admits(best.home, self.now):
                assert not self.fits(best), f"{best.id} fits and is held"

    # -- what happens --------------------------------------------------------------------

    def settle(self) -> None:
        while self.seats.changed:
            for id_ in self.seats.settle(self.now):
                assert self.doing[id_] == "wait"
                self.ready(id_)
        self.check_settled()

    def ready(self, id_: str) -> None:
        program = next(p for p in self.seats.programs() if p.id == id_)
        granted, homeless = program.granted, not program.home
        replica = self.seats.ready(id_, self.size[id_], self.now)
        self.doing[id_] = "gen" if replica else "wait"
        if replica:
            assert granted or self.admits(replica, self.now)
        if program.aged and replica:  # it was first; now others may be that wait for as long
            return
        if self.rules.admission != "kv_fit" or not program.home or granted:
            return
        if homeless:  # at once only where it displaces nobody; else `settle` says, in order
            assert not replica or self.displaces_nobody(program)
        else:
            assert bool(replica) == (self.admits(program.home, self.now) and self.fits(program))

    def launch(self) -> None:
        id_ = f"e{self.made}"
        room = {
            r: sum(max(p.context, self.seats.reserve) for p in self.at(r))
            for r, row in self.seats._rows.items()
            if self.admits(r, self.now) and not any(p.state is State.HELD for p in self.at(r))
        }
        if not self.seats.launch(id_, f"g{self.made // 4}", 500, self.now):
            return
        self.made += 1
        self.doing[id_], self.size[id_] = "box", 500
        home = self.seats.home(id_)
        if self.rules.admission == "kv_fit":
            fit = [r for r, sum_ in room.items() if not sum_ or self.roomy(r, sum_)]
            assert home in fit
            assert room[home] == min(room[r] for r in fit)

    def adopt(self) -> None:
        """A former router launched it; its KV lies somewhere, or nowhere any more."""
        id_ = f"e{self.made}"
        self.made += 1
        self.doing[id_], self.size[id_] = "tool", self.chance.choice([500, 9000, 40_000])
        wish = self.chance.choice(["", *REPLICAS])
        self.seats.adopt(id_, f"g{self.made // 4}", self.size[id_], wish)

    def every(self) -> None:
        self.seats.every(self.now)
        for replica, row in self.seats._rows.items():
            since = row.closed_since
            if since is not None and self.now - since >= WEDGE_S:
                assert not row.held, f"{replica} takes no turn since {since} and holds"

    def roomy(self, replica: str, reserved: int) -> bool:
        trust = self.seats._credits[replica].trust
        return reserved + self.seats.reserve <= self.credit(replica) * trust

    def step(self) -> None:
        x = self.chance.random()
        if x < 0.17:
            self.launch()
        elif x < 0.2:
            self.adopt()
        elif x < 0.75 and self.doing:
            self.one(self.chance.choice(sorted(self.doing)))
        elif x < 0.85:
            self.now += self.chance.choice([0.1, 1.0, 4.0])
            self.every()
        elif x < 0.93:
            self.grant(self.chance.choice(REPLICAS), anew=self.chance.random() < 0.2)
        elif x < 0.96:
            replica = self.chance.choice(REPLICAS)
            self.up ^= {replica}
            if replica in self.up:
                self.grant(replica)
            elif self.chance.random() < 0.5:  # else it only takes no turn
                self.seats.lost(replica)
                self.credits.pop(replica, None)
        else:
            self.seats.cleared(self.chance.choice(REPLICAS))

    def one(self, id_: str) -> None:
        """Whatever this conversation does next."""
        match self.doing[id_]:
            case "box" | "tool":
                self.size[id_] += self.chance.choice([0, 200, 3000])
                self.ready(id_)
            case "gen":
                self.size[id_] += self.chance.choice([50, 2000, 9000])
                cached = self.chance.choice([0, self.seats.kept(id_)])
                self.seats.turn_end(id_, self.size[id_], 0, cached, self.now)
                self.doing[id_] = "tool"
                if self.chance.random() < 0.15:
                    self.over(id_)
            case "wait" if not self.seats.holds(id_):
                self.ready(id_)  # no replica was there: it asks again

    def over(self, id_: str) -> None:
        for other in self.seats.over(id_):
            assert self.doing[other] != "gen"
        del self.doing[id_]

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
            self.settle()
            self.check()
        self.up = set(REPLICAS) - {self.closed}
        for _ in range(60 * (len(self.doing) + 1)):
            if not self.doing:
                return
            self.now += 1.0
            for replica in REPLICAS:
                self.grant(replica)
            self.every()
            self.settle()
            for id_ in sorted(self.doing):
                if id_ in self.doing:
                    self.one(id_)
                    self.settle()
            self.check()
        raise AssertionError(f"never went on: {self.doing}")


@pytest.mark.parametrize(
    ("admission", "rank"),
    [("kv_fit", "largest_context"), ("kv_fit", "arrival"), ("hold_resume", "")],
    ids=str,
)
def test_sums_answers_and_liveness_hold_whatever_happens(admission: str, rank: str) -> None:
    for seed in range(SEEDS):
        books = Books(seed, admission, rank or "largest_context")
        try:
            books.run()
        except AssertionError as problem:
            raise AssertionError(f"seed {seed}: {problem}") from problem
