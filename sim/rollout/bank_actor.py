"""The production BankMachine and a trainer without a time of its own.

Owns: what the router's records are to the bank, what the bank's commands come to, the trainer that
takes each batch at once and acknowledges it. Promise: which groups make a batch, and every fate, is
the bank's decision; a write is durable at once; the weights never change, so each step is told as
published under the same version. Does not cover: an optimizer's time, staleness of tokens.

An episode's turns reach the bank as one record of all its tokens: it looks at records only when a
group is complete, and then at each alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from muster.types import EpisodeKey, VersionSpan
from services.readybank import events as b
from services.readybank.machine import BankMachine
from services.router import events as e
from sim.rollout.heap import Heap

EPOCH = 1
TICK_S = 60.0


class Hears(Protocol):
    """Who is told of fates and steps: the router."""

    def feed(self, event: e.RouterEvent) -> None: ...


class BankActor:
    """The shell around one BankMachine, and its trainer. `batches`: what was trained so far, with
    the simulated second at which it could be."""

    def __init__(self, machine: BankMachine, heap: Heap, groups_per_batch: int):
        self.machine, self.heap = machine, heap
        self.router: Hears | None = None
        self.batches: list[tuple[float, b.Batch]] = []
        self.filtered: dict[str, str] = {}
        self.on_batch: Callable[[b.Batch], None] | None = None
        self.on_filtered: Callable[[str], None] | None = None
        self._groups = groups_per_batch
        self._inbox: deque[b.BankEvent] = deque()
        self._busy = False
        self._entries = self._calls = 0
        self._execute: dict[type[Any], Callable[[Any], None]] = {
            b.WriteFrozen: lambda c: self.feed(b.BatchFrozen(c.batch.step)),
            b.WriteTrained: self._trained,
            b.WriteFate: self._fate,
            b.WriteMark: lambda c: self.feed(b.MarkWritten(c.step)),
            b.RetireGroups: lambda c: self.feed(b.GroupsRetired(tuple(g.group for g in c.groups))),
            b.TrimStreams: lambda c: self.feed(b.StreamsTrimmed()),
            b.SendBatch: self._train,
            b.AnswerRegistered: lambda c: None,
            b.AnswerAcknowledged: lambda c: self._ask(),
            b.RefuseCall: self._refused,
            b.TellStall: lambda c: None,
            b.ScoreGroup: lambda c: self.feed(b.ScoreMissed(c.group, "nobody scores here")),
        }

    def start(self) -> None:
        """A fresh bank, and a trainer that has no step yet."""
        self.feed(b.RecoveryEnded())
        self.feed(b.TrainerRegistered(EPOCH, 0, self._call()))
        self._ask()
        self.heap.after(TICK_S, self._tick)

    def feed(self, event: b.BankEvent) -> None:
        """One event, and all that follows from it at this instant, in order."""
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        while self._inbox:
            for command in self.machine.handle(self._inbox.popleft(), self.heap.now):
                self._execute[type(command)](command)
        self._busy = False

    def _tick(self) -> None:
        self.feed(b.Tick())
        self.heap.after(TICK_S, self._tick)

    # -- what the router records -----------------------------------------------------------

    def opened(self, command: e.OpenGroup) -> None:
        self.feed(
            b.GroupOpened(
                group=command.group,
                job=command.job,
                task=command.task,
                group_size=command.group_size,
                sampling=command.sampling,
                owner_epoch=1,
                at_unix_s=self.heap.now,
                policy=command.policy,
                id=self._id(),
            )
        )

    def ended(self, command: e.RecordEpisode, sampled_tokens: int) -> None:
        """An attempt's end and label, its tokens before them."""
        key, now = command.episode, self.heap.now
        if sampled_tokens:
            self.feed(_tokens(key, sampled_tokens, now, self._id()))
        self.feed(b.EpisodeRecorded(key, 1 if sampled_tokens else 0, now, self._id()))
        self.feed(b.LabelRecorded(key, command.label, now, self._id()))

    def _id(self) -> str:
        self._entries += 1
        return f"{self._entries}-0"

    # -- the trainer ----------------------------------------------------------------------

    def _call(self) -> str:
        self._calls += 1
        return f"call-{self._calls}"

    def _ask(self) -> None:
        step = len(self.batches) + 1
        self.feed(b.LeaseAsked(EPOCH, step, self._groups, self._call(), self.heap.now))

    def _train(self, command: b.SendBatch) -> None:
        self.batches.append((self.heap.now, command.batch))
        if self.on_batch is not None:
            self.on_batch(command.batch)
        step = command.batch.step
        self.feed(b.AckAsked(EPOCH, step, self._call(), oldest_kept_step=step))

    def _trained(self, command: b.WriteTrained) -> None:
        step = command.batch.step
        self.feed(b.BatchTrained(step))
        self._tell(*(e.FateRecorded(f.group, f.fate, step) for f in command.fates))
        self._tell(e.BatchTrained(step), e.VersionPublished(0, step))

    def _fate(self, command: b.WriteFate) -> None:
        fate = command.fate
        self.filtered[fate.group] = fate.reason
        if self.on_filtered is not None:
            self.on_filtered(fate.group)
        self.feed(b.FateWritten(fate.group))
        self._tell(e.FateRecorded(fate.group, fate.fate))

    def _tell(self, *events: e.RouterEvent) -> None:
        assert self.router is not None
        for event in events:
            self.router.feed(event)

    def _refused(self, command: b.RefuseCall) -> None:
        raise RuntimeError(f"the bank refused its trainer: {command.problem} ({command.way_out})")


def _tokens(key: EpisodeKey, sampled: int, now: float, entry: str) -> b.TurnRecorded:
    spans = (VersionSpan(0, 0, sampled, 0),)
    return b.TurnRecorded(key, 0, "", sampled, spans, now, id=entry)
