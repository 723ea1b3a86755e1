"""One recorder that any arm feeds: time between batches, its split, bias, waiting engines.

Owns: what is counted and when. Promise: incremental, some microseconds per change; the same
meaning in every arm. Does not cover: the figures made from it (figures.py), the split (doing.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from muster.types import Value
from sim.rollout.doing import BOX_STATES, Doing, Timeline, split

Key = tuple[int, int]  # group, sibling


class Batch(Value, frozen=True):
    """One batch as it was cut. Times in seconds of the simulation."""

    groups: tuple[int, ...]
    asked_at: float
    at: float
    split: dict[str, float]
    tail_s: float  # from 90 % of its trajectories done (or the asking, if later) to the cut
    prefilled_tokens: int  # of the run up to the cut, as are the next two
    recomputed_tokens: int
    gpu_wait_s: float  # gpu_seconds_waiting_on_environments, all replicas

    @property
    def interval_s(self) -> float:
        """From the trainer's asking to the batch."""
        return self.at - self.asked_at


class Sample(Value, frozen=True):
    """One trajectory of a group that was trained, or completed when followed to its end."""

    group: int
    sibling: int
    attempt: int
    duration_s: float  # `alone_s` of the plan: what it takes without an arm
    age_s: float  # launch of its attempt → cut
    lag: int  # batches cut between the launch of its attempt and its own


class _Group:
    __slots__ = ("cohort", "first", "lines", "tries")

    def __init__(self, size: int, cohort: int):
        self.cohort = cohort
        self.lines = [Timeline() for _ in range(size)]
        self.first: dict[int, float] = {}  # sibling → duration of its first attempt
        self.tries: dict[int, tuple[int, float, float, int]] = {}  # attempt, duration, at, cut


class _Fleet:
    """Of one replica: how many episodes live there, how many of them in a box state."""

    __slots__ = ("boxes", "episodes", "share_s", "since", "tokens", "waited_s", "window")

    def __init__(self) -> None:
        self.episodes = self.boxes = 0
        self.share_s = self.since = 0.0  # ∫ boxes / episodes since the last sample
        self.window = 0.0  # start of that sample
        self.tokens, self.waited_s = 0.0, 0.0

    def to(self, now: float) -> None:
        if self.boxes:
            self.share_s += (now - self.since) * self.boxes / self.episodes
        self.since = now


class Recorder:
    """Feed it in the order of time. `peak_rate`: calibrated tokens per second of one replica."""

    def __init__(self, *, group_size: int, replicas: int, peak_rate: float):
        self.group_size, self.peak_rate = group_size, peak_rate
        self.batches: list[Batch] = []
        self.samples: list[Sample] = []  # trained
        self.followed: list[Sample] = []  # completed after the last batch
        self.dispatched: dict[int, list[float]] = {}  # cohort → durations of first attempts
        self.cohorts: dict[int, int] = {}  # group → cohort
        self.fates: dict[int, str] = {}  # group → trained, filtered, completed
        self.recomputed_tokens = self.prefilled_tokens = self.turns = 0
        self.attempts = self.lost = self.changes = 0
        self._open: dict[int, _Group] = {}
        self._seat: dict[Key, tuple[int, bool]] = {}  # replica, in a box state
        self._fleet = [_Fleet() for _ in range(replicas)]

    def launched(
        self, group: int, sibling: int, attempt: int, duration_s: float, now: float
    ) -> None:
        """An attempt begins, in the state queue. The first says what was dispatched.

        Until it is seated it counts for the replica with the fewest, so that engines which wait
        for boxes to start are seen to wait.
        """
        found = self._open.get(group)
        if found is None:
            found = self._open[group] = _Group(self.group_size, len(self.batches))
            self.cohorts[group] = found.cohort
        if sibling not in found.first:
            found.first[sibling] = duration_s
            self.dispatched.setdefault(found.cohort, []).append(duration_s)
        found.tries[sibling] = (attempt, duration_s, now, len(self.batches))
        line = found.lines[sibling]
        if line.done_at is not None:  # its group runs again whole
            line.changes.append((line.done_at, Doing.HOLD))
            line.done_at = None
        line.changes.append((now, Doing.QUEUE))
        self.attempts += 1
        episodes = [fleet.episodes for fleet in self._fleet]
        self.seated(group, sibling, episodes.index(min(episodes)), now)

    def state(self, group: int, sibling: int, doing: Doing, now: float) -> None:
        """What this sibling does from now on (engine states: see `generated`)."""
        self.changes += 1
        self._open[group].lines[sibling].changes.append((now, doing))
        seat = self._seat.get((group, sibling))
        if seat is not None:
            replica, boxed = seat
            if (doing in BOX_STATES) is not boxed:
                fleet = self._fleet[replica]
                fleet.to(now)
                fleet.boxes += -1 if boxed else 1
                self._seat[group, sibling] = (replica, not boxed)

    def seated(self, group: int, sibling: int, replica: int | None, now: float) -> None:
        """The replica whose episode it is from now on; None: nobody's."""
        boxed = False
        old = self._seat.pop((group, sibling), None)
        if old is not None:
            fleet, boxed = self._fleet[old[0]], old[1]
            fleet.to(now)
            fleet.episodes -= 1
            fleet.boxes -= boxed
        elif changes := self._open[group].lines[sibling].changes:
            boxed = changes[-1][1] in BOX_STATES
        if replica is not None:
            self._seat[group, sibling] = (replica, boxed)
            fleet = self._fleet[replica]
            fleet.to(now)
            fleet.episodes += 1
            fleet.boxes += boxed

    def engines(self, prefilled_tokens: int, recomputed_tokens: int) -> None:
        """What the engines have prefilled so far, and of that had computed before; told at cuts.

        Their own count: what touches and preempted requests prefill again is in it.
        """
        self.prefilled_tokens, self.recomputed_tokens = prefilled_tokens, recomputed_tokens

    def generated(
        self, group: int, sibling: int, submitted_at: float, queue_s: float, prefill_s: float
    ) -> None:
        """What an answered turn went through: told at its end, before the next state."""
        self.changes += 3
        self.turns += 1
        queued_until = submitted_at + queue_s
        self._open[group].lines[sibling].changes += (
            (submitted_at, Doing.QUEUE),
            (queued_until, Doing.PREFILL),
            (queued_until + prefill_s, Doing.DECODE),
        )

    def failed(self, group: int, sibling: int, now: float) -> None:
        """The infrastructure took the attempt; the sibling waits to be launched again."""
        self.lost += 1
        self.stopped(group, sibling, now)

    def stopped(self, group: int, sibling: int, now: float) -> None:
        """The attempt was ended by the arm itself; the sibling waits to be launched again."""
        self.state(group, sibling, Doing.HOLD, now)
        self.seated(group, sibling, None, now)

    def finished(self, group: int, sibling: int, now: float) -> None:
        """The attempt has its verdict: the sibling blocks nothing any more."""
        self.seated(group, sibling, None, now)
        self._open[group].lines[sibling].done_at = now

    def gave_up(self, group: int, sibling: int, now: float) -> None:
        """The group goes on without this sibling: it blocks nothing and is not trained."""
        self.finished(group, sibling, now)
        self._open[group].tries.pop(sibling, None)

    def cut(self, groups: Iterable[int], now: float, *, asked_at: float | None = None) -> Batch:
        """A batch is handed to the trainer; by default it asked when it got the last one."""
        ids = tuple(groups)
        if asked_at is None:
            asked_at = self.batches[-1].at if self.batches else 0.0
        found = [(group, self._open.pop(group)) for group in ids]
        lines = [line for _, group in found for line in group.lines if group.tries]
        dones = sorted(line.done_at for line in lines if line.done_at is not None)
        ninth = dones[-(-len(dones) * 9 // 10) - 1]
        shares = {str(doing): s for doing, s in split(lines, asked_at, now).items()}
        for group, state in found:
            self.samples += self._samples(group, state, now)
            self.fates[group] = "trained"
        batch = Batch(
            groups=ids,
            asked_at=asked_at,
            at=now,
            split=shares,
            tail_s=now - max(ninth, asked_at),
            prefilled_tokens=self.prefilled_tokens,
            recomputed_tokens=self.recomputed_tokens,
            gpu_wait_s=self.gpu_seconds_waiting_on_environments,
        )
        self.batches.append(batch)
        return batch

    def dropped(self, group: int) -> None:
        """The group is filtered: dispatched, never trained."""
        del self._open[group]
        self.fates[group] = "filtered"

    def completed_after(self, group: int, now: float) -> None:
        """A group that was open at the last batch, followed to its end."""
        self.followed += self._samples(group, self._open.pop(group), now)
        self.fates[group] = "completed"

    def sampled(self, replica: int, tokens: float, now: float) -> None:
        """All tokens a replica has sampled so far; told every few seconds of the simulation.

        Adds (1 - token rate / peak) × (share of its episodes in a box state) × seconds.
        """
        fleet = self._fleet[replica]
        fleet.to(now)
        span = now - fleet.window
        if span > 0.0:
            rate = (tokens - fleet.tokens) / span / self.peak_rate
            fleet.waited_s += max(1.0 - rate, 0.0) * fleet.share_s
        fleet.window, fleet.tokens, fleet.share_s = now, tokens, 0.0

    @property
    def open_groups(self) -> int:
        """Launched and without a fate."""
        return len(self._open)

    @property
    def gpu_seconds_waiting_on_environments(self) -> float:
        """Of all replicas, up to the last `sampled` of each."""
        return sum(fleet.waited_s for fleet in self._fleet)

    def _samples(self, group: int, state: _Group, now: float) -> list[Sample]:
        cut = len(self.batches)
        return [
            Sample(group, sibling, attempt, duration_s, now - at, cut - launched)
            for sibling, (attempt, duration_s, at, launched) in sorted(state.tries.items())
            if state.lines[sibling].done_at is not None
        ]
