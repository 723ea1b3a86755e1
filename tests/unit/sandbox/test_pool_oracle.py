"""The pool under random events, against a dumb book-keeper that does what the driver does.

Which starts, ends and refusals are due is worked out from plain lists, by rules written once more.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from muster.errors import Fenced
from muster.types import EpisodeKey, Limits
from services.sandbox import events as p
from services.sandbox.pool import BoxState, Pool, PoolRules
from services.sandbox.warm import Kind

EXAMPLES = int(os.environ.get("MUSTER_TEST_EXAMPLES", "200"))
RULES = PoolRules(
    boxes_max=3, starting_max=2, waiting_max=3, idle_s=40.0, adopt_s=15.0, building_max=1
)
RUNS = ("r", "s")
KINDS = (
    None,
    Kind("bare", Limits(), set_up=False),
    Kind("a", Limits()),
    Kind("a", Limits(pids=9)),
    Kind("b", Limits()),
)


@dataclass
class Book:
    """One box as the book-keeper knows it."""

    attempt: tuple[str, int] | None  # None: a set-up runs in it
    owner: int
    state: str
    touched: float
    doomed: bool = False
    content: str = ""
    working: int = 0


@dataclass
class Books:
    """Feeds the pool, and says beforehand what has to come out."""

    seed: int
    now: float = 0.0
    tickets: int = 0
    newest: dict[str, tuple[int, float]] = field(default_factory=dict)
    boxes: dict[str, Book] = field(default_factory=dict)
    queue: list[tuple[int, EpisodeKey, float, Kind | None]] = field(default_factory=list)
    contents: set[str] = field(default_factory=set)  # that have a snapshot
    made: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.pool = Pool(RULES)

    def key(self) -> EpisodeKey:
        run, epoch = self.chance.choice(RUNS), self.chance.randint(1, 4)
        return EpisodeKey(run, "g", self.chance.randint(0, 3), 1, epoch)

    def step(self) -> None:
        self.now += self.chance.choice((0.0, 0.5, 3.0, 9.0))
        settle = (self.settle, self.settle)
        verbs = (
            self.ask,
            self.speak,
            self.claim,
            self.leave,
            *settle,
            self.drop,
            self.work,
            self.tick,
        )
        event, due = self.chance.choice(verbs)()
        if event is None:
            return
        due += self.fill()
        got = self.pool.handle(event, self.now)
        assert sorted(map(repr, got)) == sorted(map(repr, due)), (event, got, due)
        self.check()

    # What each event is to bring ---------------------------------------------------------

    def hear(self, run: str, epoch: int) -> list[p.Command]:
        known = self.newest.get(run)
        if known is not None and epoch <= known[0]:
            return []
        self.newest[run] = (epoch, self.now)
        due: list[p.Command] = [p.TellFormer()] if known else []
        for item in [i for i in self.queue if i[1].run == run and i[1].owner_epoch < epoch]:
            self.queue.remove(item)
            due.append(p.RefuseTicket(item[0], True, "a newer owner epoch has spoken"))
        return due

    def ask(self) -> tuple[p.Event | None, list[p.Command]]:
        key, limit = self.key(), self.now + self.chance.choice((1.0, 20.0))
        kind = self.chance.choice(KINDS)
        self.tickets += 1
        due = self.hear(key.run, key.owner_epoch)
        if key.owner_epoch < self.newest[key.run][0]:
            due.append(p.RefuseTicket(self.tickets, True, "a newer owner epoch has spoken"))
        elif len(self.queue) >= RULES.waiting_max:
            problem = "3 callers wait for a box already"
            due.append(p.RefuseTicket(self.tickets, False, problem))
        else:
            self.queue.append((self.tickets, key, limit, kind))
        return p.Asked(self.tickets, key, limit, kind), due

    def speak(self) -> tuple[p.Event | None, list[p.Command]]:
        key, name = self.key(), self.chance.choice([*self.boxes, "unknown"])
        due = self.hear(key.run, key.owner_epoch)
        book, attempt = self.boxes.get(name), (key.run, key.sibling)
        if book and book.attempt == attempt and key.owner_epoch == self.newest[key.run][0]:
            book.owner, book.touched = key.owner_epoch, self.now
        return p.Spoke(key, name), due

    def claim(self) -> tuple[p.Event | None, list[p.Command]]:
        run, epoch = self.chance.choice(RUNS), self.chance.randint(1, 4)
        return p.Claimed(run, epoch), self.hear(run, epoch)

    def leave(self) -> tuple[p.Event | None, list[p.Command]]:
        if self.queue and self.chance.random() < 0.5:
            item = self.chance.choice(self.queue)
            self.queue.remove(item)
            return p.GaveUp(item[0]), []
        owned = [name for name, book in self.boxes.items() if book.attempt]
        if not owned:
            return None, []
        name = self.chance.choice(owned)
        return p.Released(name), self.end(name, "released")

    def end(self, name: str, why: str) -> list[p.Command]:
        book = self.boxes[name]
        if book.state == "ready":
            book.state = "ending"
            return [p.EndBox(name, why)]
        if book.state == "starting":
            book.doomed = True
        return []

    def settle(self) -> tuple[p.Event | None, list[p.Command]]:
        """Something that the driver was told to begin is over."""
        busy = [name for name, book in self.boxes.items() if book.state != "ready"]
        if not busy:
            return None, []
        name = self.chance.choice(busy)
        book = self.boxes[name]
        if book.state == "ending":
            del self.boxes[name]
            return p.Ended(name), []
        if book.state == "building":
            return self.set_up_over(name, book.content)
        if self.chance.random() < 0.2:
            del self.boxes[name]
            return p.StartFailed(name), []
        book.state, book.touched = "ready", self.now
        return p.Started(name), self.end(name, "released") if book.doomed else []

    def set_up_over(self, name: str, content: str) -> tuple[p.Event, list[p.Command]]:
        del self.boxes[name]
        if self.chance.random() < 0.7:
            self.contents.add(content)
            return p.Built(name), []
        due: list[p.Command] = []
        for item in [i for i in self.queue if i[3] and i[3].content == content]:
            self.queue.remove(item)
            due.append(p.TellFailure(item[0], name))
        return p.BuildFailed(name), due

    def drop(self) -> tuple[p.Event | None, list[p.Command]]:
        """A snapshot is made room for."""
        content = self.chance.choice("ab")
        self.contents.discard(content)
        return p.Dropped(content), []

    def work(self) -> tuple[p.Event | None, list[p.Command]]:
        """A step, verification or copy begins or ends."""
        ready = [name for name, book in self.boxes.items() if book.state == "ready"]
        if not ready:
            return None, []
        name = self.chance.choice(ready)
        book = self.boxes[name]
        more = -1 if book.working and self.chance.random() < 0.5 else 1
        book.working, book.touched = book.working + more, self.now
        return p.Working(name) if more > 0 else p.Rested(name), []

    def tick(self) -> tuple[p.Event | None, list[p.Command]]:
        due: list[p.Command] = []
        for name, book in self.boxes.items():
            if book.state != "ready" or not book.attempt or book.working:
                continue
            epoch, since = self.newest[book.attempt[0]]
            if self.now - book.touched > RULES.idle_s:
                due += self.end(name, "untouched for 40 s")
            elif book.owner < epoch and self.now - since > RULES.adopt_s:
                due += self.end(name, f"owner epoch {epoch} has no use for it")
        for item in [i for i in self.queue if i[2] <= self.now]:
            self.queue.remove(item)
            problem = "all 3 boxes of this host stayed in use"
            due.append(p.RefuseTicket(item[0], False, problem))
        return p.Ticked(), due

    def fill(self) -> list[p.Command]:
        due: list[p.Command] = []
        for item in list(self.queue):
            if len(self.boxes) >= RULES.boxes_max:
                break
            ticket, key, _, kind = item
            states = [book.state for book in self.boxes.values()]
            if kind and kind.set_up and kind.content not in self.contents:
                if "building" not in states:  # one at a time
                    name = self.box(Book(None, 0, "building", self.now, content=kind.content))
                    due.append(p.RunSetup(name, kind, ticket))
            elif states.count("starting") < RULES.starting_max:
                self.queue.remove(item)
                attempt = (key.run, key.sibling)
                name = self.box(Book(attempt, key.owner_epoch, "starting", self.now))
                due.append(p.StartBox(ticket, name, key))
        return due

    def box(self, book: Book) -> str:
        self.made += 1
        self.boxes[f"box-{self.made}"] = book
        return f"box-{self.made}"

    # What holds at any time --------------------------------------------------------------

    def check(self) -> None:
        assert set(self.pool.boxes) == set(self.boxes)
        assert self.pool.waiting == len(self.queue)
        for run in RUNS:
            living = {
                name
                for name, book in self.boxes.items()
                if book.state == "ready" and book.attempt and book.attempt[0] == run
            }
            assert set(self.pool.living(run)) == living
        for name, book in self.boxes.items():
            if book.attempt is None:
                continue
            run, sibling = book.attempt
            for epoch in range(1, 5):
                error = self.pool.refusal(EpisodeKey(run, "g", sibling, 1, epoch), name)
                former = epoch < self.newest[run][0]
                assert isinstance(error, Fenced) == former
                assert (error is None) == (book.state == "ready" and not former)


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 1 << 32), st.integers(1, 120))
def test_the_pool_does_what_the_book_keeper_says(seed: int, steps: int) -> None:
    books = Books(seed)
    for _ in range(steps):
        books.step()


@dataclass
class Wardens:
    """Does what the pool says, in any order and with failures, boxes standing ready as well."""

    seed: int
    now: float = 0.0
    tickets: int = 0
    waiting: set[int] = field(default_factory=set)
    todo: list[p.Command] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # boxes that somebody has or had

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.rules = PoolRules(
            boxes_max=self.chance.randint(1, 6),
            starting_max=self.chance.randint(1, 3),
            waiting_max=100,
            warm_max=self.chance.randint(0, 4),
            warm_idle_s=20.0,
            building_max=self.chance.randint(1, 2),
        )
        self.pool = Pool(self.rules)

    def feed(self, event: p.Event) -> None:
        for command in self.pool.handle(event, self.now):
            match command:
                case p.RefuseTicket(ticket) | p.TellFailure(ticket):
                    self.waiting.remove(ticket)
                case p.StartBox(ticket) | p.HandOver(ticket):
                    self.waiting.remove(ticket)
                    self.todo.append(command)
                case _:
                    self.todo.append(command)
        self.check()

    def ask(self) -> None:
        self.tickets += 1
        self.waiting.add(self.tickets)
        group, sibling = f"g{self.chance.randint(0, 5)}", self.chance.randint(0, 3)
        key = EpisodeKey("r", group, sibling, self.tickets, 1)
        self.feed(p.Asked(self.tickets, key, 1e9, self.chance.choice(KINDS)))

    def settle(self, failing: float) -> None:
        """Something that was ordered is over."""
        command = self.todo.pop(self.chance.randrange(len(self.todo)))
        failed = self.chance.random() < failing
        match command:
            case p.RunSetup(box):
                self.feed(p.BuildFailed(box) if failed else p.Built(box))
            case p.StartBox(_, box):
                self.use(box)
                self.feed(p.StartFailed(box) if failed else p.Started(box, 0.1))
            case p.StartWarm(box):
                self.feed(p.StartFailed(box) if failed else p.Started(box, 0.1))
            case p.HandOver(ticket, box):
                self.use(box)
                if failed:
                    self.waiting.add(ticket)
                self.feed(p.FoundDead(box) if failed else p.Handed(box))
            case p.EndBox(box):
                self.feed(p.Ended(box))

    def use(self, box: str) -> None:
        assert box not in self.used
        self.used.add(box)

    def release(self) -> None:
        ready = [n for n, state in self.pool.states.items() if state is BoxState.READY]
        if ready:
            self.feed(p.Released(self.chance.choice(ready)))

    def step(self) -> None:
        self.now += self.chance.choice((0.0, 0.1, 4.0))
        verb = self.chance.random()
        if verb < 0.4:
            self.ask()
        elif verb < 0.8 and self.todo:
            self.settle(failing=0.2)
        elif verb < 0.88:
            self.release()
        elif verb < 0.92:
            self.feed(p.Dropped(self.chance.choice("ab")))
        else:
            self.feed(p.Ticked())

    def drain(self) -> None:
        """Nobody asks any more, everything succeeds, and boxes are given back."""
        for _ in range(4000):
            if not self.waiting:
                return
            if self.todo:
                self.settle(failing=0.0)
            else:
                self.release()
        raise AssertionError(f"{self.waiting} wait for ever: {self.pool.states}")

    def check(self) -> None:
        states = list(self.pool.states.values())
        assert len(states) <= self.rules.boxes_max
        assert states.count(BoxState.STARTING) <= self.rules.starting_max
        assert states.count(BoxState.BUILDING) <= self.rules.building_max
        assert states.count(BoxState.WARM) <= self.rules.warm_max
        assert self.pool.waiting == len(self.waiting)


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 1 << 32), st.integers(1, 150))
def test_bounds_hold_each_box_is_used_once_and_nobody_waits_for_ever(seed: int, steps: int) -> None:
    wardens = Wardens(seed)
    for _ in range(steps):
        wardens.step()
    wardens.drain()
