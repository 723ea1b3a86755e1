"""Trainer incarnations, their leases, and the steps frozen so far.

Owns: who the trainer is, which call waits, which steps exist and which are trained. Promise: an
older trainer epoch is refused; a frozen step is never changed; the end of a step is written once
and every caller that depends on it is answered after it is durable. Does not cover: which groups
(batch.py, machine.py).

A bank that restarted knows no registration. It then takes the newest trainer epoch at its word, so
that its restart is nothing the trainer needs to notice.

A bank may know less than a checkpoint: a power cut can take the last second of the streams. The
groups of a step that the checkpoint has and the bank has not would be leased a second time. So a
trainer brings the batches of its newest checkpoint when it registers; the bank takes those that it
lacks, or, when it lacks a step that nobody brings, takes and leases nothing and says what to
restore.

The mark is the newest step that is in every checkpoint the trainer keeps. Steps up to it are
trained for good: they are not leased again, and what is kept of them is deleted (retire.py). It is
durable before anything goes; a trainer that comes back from before it is refused.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from muster.types import Value
from services.readybank.events import (
    AckAsked,
    AnswerAcknowledged,
    AnswerRegistered,
    BankRules,
    Batch,
    LeaseAsked,
    RefuseCall,
    TrainerRegistered,
)

Answer = AnswerRegistered | AnswerAcknowledged
_TOLD_MAX = 400
_RESTORE = (
    "restore the Redis data of this run, register with the batches that the checkpoint keeps, or "
    "start a new run"
)


class Waiting(Value, frozen=True):
    """A lease call that has no batch yet."""

    call: str
    step: int
    groups: int
    asked_unix_s: float


@dataclass
class _Pending:
    """An answer that waits until these steps are durably trained."""

    steps: set[int]
    answer: Answer


@dataclass
class Leases:
    """State of one run's trainer side."""

    rules: BankRules
    epoch: int = 0
    registered: bool = False  # in this incarnation of the bank
    heard: bool = False  # the trainer's word agrees with what is recorded here
    last_durable: int = 0
    leased: int = 0  # newest step that the trainer's present incarnation has or has had
    frozen: dict[int, Batch] = field(default_factory=dict)
    freezing: dict[int, Batch] = field(default_factory=dict)  # being written
    trained: set[int] = field(default_factory=set)
    waiting: Waiting | None = None
    oldest_kept: int = 0  # as the trainer said
    mark: int = 0  # durable
    _marking: int = 0  # being written, or the mark
    _training: set[int] = field(default_factory=set)
    _pending: list[_Pending] = field(default_factory=list)
    _first_asked: dict[int, float] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """The newest step with a composition."""
        return max(self.mark, max(self.frozen, default=0), max(self.freezing, default=0))

    def batch(self, step: int) -> Batch | None:
        """The composition of `step`, durable or being written."""
        return self.frozen.get(step) or self.freezing.get(step)

    def brought(self, event: TrainerRegistered) -> list[Batch]:
        """The batches that the trainer has and this bank has lost: to be frozen now. None of a
        trainer that is refused."""
        return [] if self._refused(event) else self._missing(event)

    def register(self, event: TrainerRegistered) -> tuple[list[int], list[Answer | RefuseCall]]:
        """Steps to record as trained now, and what to answer now.

        Batches that were `brought` are being written by now.
        """
        refused = self._refused(event)
        if refused:
            return [], [refused]
        gone: list[Answer | RefuseCall] = []
        if event.epoch > self.epoch and self.waiting:
            gone, self.waiting = [self._fenced(self.waiting.call, self.epoch, event.epoch)], None
        self.epoch, self.registered, self.heard = event.epoch, True, True
        self.last_durable = self.leased = event.last_durable_step
        self.oldest_kept = max(self.oldest_kept, event.oldest_kept_step)
        known = self.frozen.keys() | self.freezing.keys()
        unseen = tuple(sorted(s for s in known if s > event.last_durable_step))
        answer = AnswerRegistered(event.call, unseen, event.last_durable_step + 1)
        steps, answers = self._when_trained(event.last_durable_step, answer)
        return steps, [*gone, *answers]

    def ask(self, event: LeaseAsked) -> list[RefuseCall]:
        """Let the call wait for its step, or refuse it."""
        refused = self._unknown_trainer(event.call, event.epoch) or self._wrong_step(event)
        if refused:
            return [refused]
        self.heard = True
        asked = self._first_asked.setdefault(event.step, event.at_unix_s)
        old = self.waiting
        self.waiting = Waiting(event.call, event.step, event.groups, asked)
        if old is None:
            return []
        problem, way_out = "a newer call took the place of this lease", "keep one lease call open"
        return [_refuse(old.call, problem, old.step, way_out)]

    def acknowledge(self, event: AckAsked) -> tuple[list[int], list[Answer | RefuseCall]]:
        """Like register: a checkpoint with this step has all steps before it too."""
        refused = self._unknown_trainer(event.call, event.epoch)
        if refused:
            return [], [refused]
        batch = self.frozen.get(event.step)
        if batch is None and event.step > self.mark:
            problem = "no batch of this step was leased"
            return [], [_refuse(event.call, problem, event.step, "acknowledge a leased step")]
        self.last_durable = max(self.last_durable, event.step)
        self.oldest_kept = max(self.oldest_kept, event.oldest_kept_step)
        answer = AnswerAcknowledged(event.call, len(batch.members) if batch else 0)
        steps, answers = self._when_trained(event.step, answer)
        return steps, [*answers]

    def markable(self) -> int:
        """A step that can become the mark now, to be written; 0 when there is none."""
        if self._marking > self.mark:
            return 0
        step = self.mark
        while step < min(self.oldest_kept, self.last_durable) and step + 1 in self.trained:
            step += 1
        if step == self.mark:
            return 0
        self._marking = step
        return step

    def marked(self, step: int) -> list[Batch]:
        """The mark is durable: batches whose groups go. The mark's own composition is kept, so
        that a trainer that stands there can be compared with it."""
        self.mark = max(self.mark, step)
        self._marking = max(self._marking, self.mark)
        self.last_durable = max(self.last_durable, self.mark)
        batches = [self.frozen[s] for s in sorted(self.frozen) if s <= self.mark]
        for s in [s for s in self.frozen if s < self.mark]:
            del self.frozen[s]
        self.trained = {s for s in self.trained if s >= self.mark} | {self.mark} - {0}
        return batches

    def gone(self, call: str) -> None:
        """The caller no longer listens."""
        if self.waiting and self.waiting.call == call:
            self.waiting = None
        self._pending = [p for p in self._pending if p.answer.call != call]

    def wants(self) -> Waiting | None:
        """The waiting call whose step has no composition yet."""
        waiting = self.waiting
        if waiting is None or self.batch(waiting.step):
            return None
        return waiting

    def freeze(self, batch: Batch) -> None:
        """The composition is being written; it stands from now on."""
        self.freezing[batch.step] = batch
        self._first_asked.clear()

    def froze(self, step: int) -> list[int]:
        """The composition of `step` is durable: steps to record as trained now."""
        batch = self.freezing.pop(step, None)
        if batch is None:
            return []
        self.frozen[step] = batch
        if step in self._training or not any(step in p.steps for p in self._pending):
            return []
        self._training.add(step)
        return [step]

    def due(self) -> tuple[Waiting, Batch] | None:
        """The waiting call and its durable batch, once; it is then no longer waiting."""
        waiting = self.waiting
        if waiting is None or waiting.step not in self.frozen:
            return None
        self.waiting = None
        self.leased = max(self.leased, waiting.step)
        return waiting, self.frozen[waiting.step]

    def ended(self, step: int) -> list[Answer]:
        """The end of `step` is durable: whom this answers."""
        self.trained.add(step)
        self._training.discard(step)
        for pending in self._pending:
            pending.steps.discard(step)
        answers = [p.answer for p in self._pending if not p.steps]
        self._pending = [p for p in self._pending if p.steps]
        return answers

    def _when_trained(self, step: int, answer: Answer) -> tuple[list[int], list[Answer]]:
        known = self.frozen.keys() | self.freezing.keys()
        missing = {s for s in known if s <= step and s not in self.trained}
        if not missing:
            return [], [answer]
        fresh = sorted((missing & self.frozen.keys()) - self._training)
        self._training.update(fresh)
        self._pending.append(_Pending(missing, answer))
        return fresh, []

    def _missing(self, event: TrainerRegistered) -> list[Batch]:
        """Of the trainer's batches, those that are not over for good and have no record here."""
        over = max(self.mark, self._marking)
        return [b for b in event.batches if b.step > over and self.batch(b.step) is None]

    def _lost(self, step: int, brought: Collection[int] = ()) -> int:
        """The first step up to `step` without a composition, 0 when there is none."""
        steps = (s for s in range(self.mark + 1, step + 1) if s not in brought)
        return next((s for s in steps if self.batch(s) is None), 0)

    def _refused(self, event: TrainerRegistered) -> RefuseCall | None:
        older = self._older(event.call, event.epoch)
        return older or self._before_mark(event) or self._unlike(event)

    def _unlike(self, event: TrainerRegistered) -> RefuseCall | None:
        """Why the trainer's checkpoint and the records here cannot both be true, if so."""
        for batch in event.batches:
            known = self.batch(batch.step)
            if known and known.members != batch.members:
                return RefuseCall(
                    event.call,
                    f"the record here of step {known.step} says {told(known)}",
                    "batches",
                    told(batch),
                    "restore checkpoints and Redis data that belong together, or start a new run",
                )
        last = event.last_durable_step
        lost = self._lost(last, {b.step for b in self._missing(event)})
        if not lost:
            return None
        problem = (
            f"the checkpoint has step {last}, and the record of step {lost} is lost here: its "
            "groups would be trained twice"
        )
        return RefuseCall(event.call, problem, "last_durable_step", str(last), _RESTORE)

    def _before_mark(self, event: TrainerRegistered) -> RefuseCall | None:
        """Its lineage would need groups that are deleted."""
        last, mark = event.last_durable_step, max(self.mark, self._marking)
        if last >= mark:
            return None
        problem = (
            f"the trainer told that each of its checkpoints has step {mark}, so the groups up to "
            f"there are deleted; this one has only step {last}"
        )
        way_out = f"restore a checkpoint of step {mark} or later, or start a new run"
        return RefuseCall(event.call, problem, "last_durable_step", str(last), way_out)

    def _older(self, call: str, epoch: int) -> RefuseCall | None:
        return self._fenced(call, epoch, self.epoch) if epoch < self.epoch else None

    def _unknown_trainer(self, call: str, epoch: int) -> RefuseCall | None:
        if epoch < self.epoch:
            return self._fenced(call, epoch, self.epoch)
        if epoch > self.epoch:
            if self.registered:
                return RefuseCall(
                    call,
                    "this trainer is not registered",
                    "trainer_epoch",
                    str(epoch),
                    "call RegisterTrainer first",
                )
            self.epoch = epoch
        return None

    def _wrong_step(self, event: LeaseAsked) -> RefuseCall | None:
        if event.step <= self.last_durable:
            problem = f"the trainer said that its checkpoint has step {self.last_durable}"
            way_out = f"ask for step {self.last_durable + 1}"
            return _refuse(event.call, problem, event.step, way_out)
        # Without a registration the trainer's word is taken, as far as it fits what is frozen.
        lost = 0 if self.registered else self._lost(event.step - 1)
        if lost:
            problem = f"this bank has no record of step {lost}"
            way_out = "call RegisterTrainer with the checkpoint's batches, which bring it back"
            return _refuse(event.call, problem, event.step, way_out)
        if self.registered and event.step > self.leased + 1:
            problem, way_out = "steps follow one another", f"ask for step {self.leased + 1}"
            return _refuse(event.call, problem, event.step, way_out)
        open_steps = [s for s in self.frozen if s not in self.trained]
        if event.step > self.newest and len(open_steps) >= self.rules.unacknowledged_max:
            problem = f"{len(open_steps)} batches are leased and not acknowledged"
            return _refuse(
                event.call,
                problem,
                event.step,
                f"acknowledge step {min(open_steps)}, or raise readybank.unacknowledged_max",
            )
        return None

    @staticmethod
    def _fenced(call: str, epoch: int, newest: int) -> RefuseCall:
        return RefuseCall(
            call,
            "a newer trainer took over",
            "trainer_epoch",
            str(epoch),
            f"stop: epoch {newest} is in charge",
            fenced=True,
        )


def told(batch: Batch) -> str:
    """Its members for people, cut to a length that fits a message."""
    text = " ".join(f"{m.group}{[*m.attempts]}".replace(" ", "") for m in batch.members)
    return text if len(text) <= _TOLD_MAX else f"{text[:_TOLD_MAX]}…"


def in_two_batches(call: str, batches: list[Batch], group: str) -> RefuseCall:
    """A checkpoint's batches, one of which has the group, and the records here exclude each
    other."""
    batch = [b for b in batches if any(m.group == group for m in b.members)][-1]
    return RefuseCall(
        call,
        f"group {group} of the checkpoint's step {batch.step} stands in another batch here",
        "batches",
        told(batch),
        "restore checkpoints and Redis data that belong together, or start a new run",
    )


def _refuse(call: str, problem: str, step: int, way_out: str) -> RefuseCall:
    return RefuseCall(call, problem, "step", str(step), way_out)
