"""How evaluation and training share the launches.

Owns: the launch orders of both, whose turn it is. Promise: pure; while both have somebody to
launch, `share` of the launches are evaluation's and the rest training's, so neither starves the
other; while a training job runs, at most that share of the places is evaluation's, so what training
opens next finds most of them; else whoever has somebody launches. What a former router left goes
first. Does not cover: the order within each (order.py), whether there is room (seats.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from services.router.order import LaunchOrder, Place, Skip


class Launches:
    """`share`: 0..1 of the launches; `most`: episodes that may run at once."""

    def __init__(self, interleave: int, share: float, most: int):
        self._training, self._evaluation = LaunchOrder(interleave), LaunchOrder(interleave)
        self._share, self._places = share, max(1, int(share * most))
        self._evaluates: set[str] = set()  # groups
        self._owed = 0.0  # launches, to evaluation
        self._both = False  # had somebody to launch when `next` was asked

    def of(self, group: str, *, evaluates: bool) -> LaunchOrder:
        """Where the places of this group wait."""
        if evaluates:
            self._evaluates.add(group)
        return self._evaluation if evaluates else self._training

    @property
    def resuming(self) -> int:
        """Attempts that a former router left and that wait."""
        return self._training.resuming + self._evaluation.resuming

    def drop(self, group: str) -> None:
        """Nothing of it is launched any more."""
        self._order(group).drop(group)
        self._evaluates.discard(group)

    def next(self, skip: Skip, *, evaluating: int, training_runs: bool) -> Place | None:
        """The place to launch; None when there is none. It stays here.

        evaluating: episodes of evaluation that run; training_runs: a training job does.
        """
        self._both = False
        for order in (self._training, self._evaluation):
            resumed = order.next_resume(skip)
            if resumed is not None:  # one that waits for its host holds up nobody else
                return resumed
        training = self._training.next(skip)
        full = training_runs and evaluating >= self._places
        evaluation = None if full else self._evaluation.next(skip)
        if training is None or evaluation is None:
            return training or evaluation
        self._both = True
        return evaluation if self._owed + self._share >= 1.0 else training

    def launched(self, place: Place) -> None:
        """It waits no more."""
        evaluates = place[0] in self._evaluates
        if self._both:
            self._owed += self._share - evaluates
        self._order(place[0]).launched(place)

    def _order(self, group: str) -> LaunchOrder:
        return self._evaluation if group in self._evaluates else self._training

    def __iter__(self) -> Iterator[Place]:
        yield from self._training
        yield from self._evaluation

    def __len__(self) -> int:
        return len(self._training) + len(self._evaluation)

    def __bool__(self) -> bool:
        return bool(self._training) or bool(self._evaluation)
