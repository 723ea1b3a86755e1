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
from muster.types import EpisodeKey
from services.sandbox import pool as p

EXAMPLES = int(os.environ.get("MUSTER_TEST_EXAMPLES", "200"))
RULES = p.PoolRules(boxes_max=3, starting_max=2, waiting_max=2, idle_s=40.0, adopt_s=15.0)
RUNS = ("r", "s")


@dataclass
class Book:
    """One box as the book-keeper knows it."""

    attempt: tuple[str, int]
    owner: int
    state: str
    touched: float
    doomed: bool = False


@dataclass
class Books:
    """Feeds the pool, and says beforehand what has to come out."""

    seed: int
    now: float = 0.0
    tickets: int = 0
    newest: dict[str, tuple[int, float]] = field(default_factory=dict)
    boxes: dict[str, Book] = field(default_factory=dict)
    queue: list[tuple[int, EpisodeKey, float]] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.pool = p.Pool(RULES)

    def key(self) -> EpisodeKey:
        run, epoch = self.chance.choice(RUNS), self.chance.randint(1, 4)
        return EpisodeKey(run, "g", self.chance.randint(0, 3), 1, epoch)

    def step(self) -> None:
        self.now += self.chance.choice((0.0, 0.5, 3.0, 9.0))
        verbs = (self.ask, self.speak, self.claim, self.leave, self.settle, self.settle, self.tick)
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
        self.tickets += 1
        due = self.hear(key.run, key.owner_epoch)
        if key.owner_epoch < self.newest[key.run][0]:
            due.append(p.RefuseTicket(self.tickets, True, "a newer owner epoch has spoken"))
        elif len(self.queue) >= RULES.waiting_max:
            problem = "2 callers wait for a box already"
            due.append(p.RefuseTicket(self.tickets, False, problem))
        else:
            self.queue.append((self.tickets, key, limit))
        return p.Asked(self.tickets, key, limit), due

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
        if not self.boxes:
            return None, []
        name = self.chance.choice(list(self.boxes))
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
        if self.chance.random() < 0.2:
            del self.boxes[name]
            return p.StartFailed(name), []
        book.state, book.touched = "ready", self.now
        return p.Started(name), self.end(name, "released") if book.doomed else []

    def tick(self) -> tuple[p.Event | None, list[p.Command]]:
        due: list[p.Command] = []
        for name, book in self.boxes.items():
            epoch, since = self.newest[book.attempt[0]]
            if book.state != "ready":
                continue
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
        while self.queue and len(self.boxes) < RULES.boxes_max:
            if sum(book.state == "starting" for book in self.boxes.values()) >= RULES.starting_max:
                break
            ticket, key, _ = self.queue.pop(0)
            self.made += 1
            name = f"box-{self.made}"
            attempt = (key.run, key.sibling)
            self.boxes[name] = Book(attempt, key.owner_epoch, "starting", self.now)
            due.append(p.StartBox(ticket, name, key))
        return due

    # What holds at any time --------------------------------------------------------------

    def check(self) -> None:
        assert set(self.pool.boxes) == set(self.boxes)
        assert self.pool.waiting == len(self.queue)
        for run in RUNS:
            living = {
                n for n, b in self.boxes.items() if b.state == "ready" and b.attempt[0] == run
            }
            assert set(self.pool.living(run)) == living
        for name, book in self.boxes.items():
            run, sibling = book.attempt
            for epoch in range(1, 5):
                error = self.pool.refusal(EpisodeKey(run, "g", sibling, 1, epoch), name)
                former = epoch < self.newest[run][0]
                assert isinstance(error, Fenced) == former
                assert (error is None) == (book.state == "ready" and not former)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 120))
def test_the_pool_does_what_the_book_keeper_says(seed: int, steps: int) -> None:
    books = Books(seed)
    for _ in range(steps):
        books.step()
