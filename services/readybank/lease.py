"""Trainer incarnations, their leases, and the steps frozen so far.

Owns: who the trainer is, which call waits, which steps exist and which are trained. Promise: an
older trainer epoch is refused; a frozen step is never changed; the end of a step is written once
and every caller that depends on it is answered after it is durable. Does not cover: which groups
(batch.py, composing.py), groups that are given back (returning.py), texts (refusals.py).

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
from services.readybank import refusals
from services.readybank.events import (
    AckAsked,
    AnswerAcknowledged,
    AnswerRegistered,
    AnswerReturned,
    BankRules,
    Batch,
    LeaseAsked,
    RefuseCall,
    TrainerRegistered,
)
from services.readybank.refusals import refuse

Answer = AnswerRegistered | AnswerAcknowledged | AnswerReturned
LEASES_MAX = 2  # that wait: for a batch whose groups were given back, and for the next one


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
    short: dict[int, Batch] = field(default_factory=dict)  # groups of it were given back
    returning: dict[int, Batch] = field(default_factory=dict)  # the same, being written
    trained: set[int] = field(default_factory=set)
    oldest_kept: int = 0  # as the trainer said
    mark: int = 0  # durable
    _marking: int = 0  # being written, or the mark
    _waiting: dict[int, Waiting] = field(default_factory=dict)  # by step
    _training: set[int] = field(default_factory=set)
    _pending: list[_Pending] = field(default_factory=list)
    _given: dict[int, list[AnswerReturned]] = field(default_factory=dict)  # when that is durable
    _first_asked: dict[int, float] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """The newest step with a composition."""
        return max(self.mark, *self.steps(), 0)

    def steps(self) -> set[int]:
        """Those with a composition; it may lack groups."""
        return {*self.frozen, *self.freezing, *self.short, *self.returning}

    def batch(self, step: int) -> Batch | None:
        """The composition of `step`, durable or being written; it may lack groups."""
        for kept in (self.frozen, self.freezing, self.short, self.returning):
            if step in kept:
                return kept[step]
        return None

    @property
    def waiting(self) -> Waiting | None:
        """The call that is served next: of the lowest step."""
        return self._waiting[min(self._waiting)] if self._waiting else None

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
        if event.epoch > self.epoch:
            waiting = [self._waiting.pop(step) for step in sorted(self._waiting)]
            gone += [refusals.fenced(w.call, self.epoch, event.epoch) for w in waiting]
        self.epoch, self.registered, self.heard = event.epoch, True, True
        self.last_durable = self.leased = event.last_durable_step
        self.oldest_kept = max(self.oldest_kept, event.oldest_kept_step)
        unseen = tuple(sorted(s for s in self.steps() if s > event.last_durable_step))
        answer = AnswerRegistered(event.call, unseen, event.last_durable_step + 1)
        steps, answers = self._when_trained(event.last_durable_step, answer)
        return steps, [*gone, *answers]

    def ask(self, event: LeaseAsked) -> list[RefuseCall]:
        """Let the call wait for its step, or refuse it."""
        refused = self.unknown_trainer(event.call, event.epoch) or self._wrong_step(event)
        if refused:
            return [refused]
        self.heard = True
        asked = self._first_asked.setdefault(event.step, event.at_unix_s)
        old = self._waiting.pop(event.step, None)
        if old is None and len(self._waiting) == LEASES_MAX:
            old = self._waiting.pop(max(self._waiting))
        self._waiting[event.step] = Waiting(event.call, event.step, event.groups, asked)
        if old is None:
            return []
        problem, way_out = "a newer call took the place of this lease", "keep one open for a step"
        return [refuse(old.call, problem, old.step, way_out)]

    def acknowledge(self, event: AckAsked) -> tuple[list[int], list[Answer | RefuseCall]]:
        """Like register: a checkpoint with this step has all steps before it too."""
        refused = self.unknown_trainer(event.call, event.epoch)
        if refused:
            return [], [refused]
        batch = self.frozen.get(event.step)
        if batch is None and event.step > self.mark:
            problem = "no batch of this step was leased"
            return [], [refuse(event.call, problem, event.step, "acknowledge a leased step")]
        other = self._other_revision(event.step, event.revision)
        if other:
            return [], [refuse(event.call, other, event.step, refusals.REGISTER)]
        lacks = min(self.lacking(), default=0)
        if 0 < lacks <= event.step:
            problem = f"groups of step {lacks} were given back, and it was not leased again"
            way_out = f"lease step {lacks}, then train on it"
            return [], [refuse(event.call, problem, event.step, way_out)]
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
        self._waiting = {s: w for s, w in self._waiting.items() if w.call != call}
        self._pending = [p for p in self._pending if p.answer.call != call]
        self._given = {s: [a for a in to if a.call != call] for s, to in self._given.items()}

    def wants(self) -> Waiting | None:
        """The first waiting call whose step has no composition yet, or lacks groups. No step is
        composed while one before it lacks some."""
        for step in sorted(self._waiting):
            if step in self.frozen or step in self.freezing:
                continue
            held_up = step in self.returning or min(self.lacking(), default=step) < step
            return None if held_up else self._waiting[step]
        return None

    def freeze(self, batch: Batch) -> None:
        """The composition is being written; it stands from now on."""
        self.freezing[batch.step] = batch
        for kept in (self.frozen, self.short):  # of an older revision
            kept.pop(batch.step, None)
        self._first_asked.pop(batch.step, None)

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

    def give_back(self, short: Batch, answer: AnswerReturned) -> None:
        """What stays of a frozen step is being written; it stands from now on."""
        del self.frozen[short.step]
        self.returning[short.step] = short
        self._given.setdefault(short.step, []).append(answer)

    def when_returned(self, step: int, answer: AnswerReturned) -> AnswerReturned | None:
        """The answer to a repeat; None while what it repeats is not durable."""
        if step not in self.returning:
            return answer
        self._given.setdefault(step, []).append(answer)
        return None

    def returned(self, step: int) -> list[AnswerReturned]:
        """That is durable: whom this answers."""
        self.short[step] = self.returning.pop(step)
        return self._given.pop(step, [])

    def ends(self, step: int) -> bool:
        """It is trained, or that is being written."""
        return step in self.trained or step in self._training

    def due(self) -> tuple[Waiting, Batch] | None:
        """A waiting call and its durable batch, once; it is then no longer waiting."""
        step = min((s for s in self._waiting if s in self.frozen), default=0)
        if not step:
            return None
        self.leased = max(self.leased, step)
        return self._waiting.pop(step), self.frozen[step]

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
        known = {*self.frozen, *self.freezing}
        missing = {s for s in known if s <= step and s not in self.trained}
        if not missing:
            return [], [answer]
        fresh = sorted((missing & self.frozen.keys()) - self._training)
        self._training.update(fresh)
        self._pending.append(_Pending(missing, answer))
        return fresh, []

    def _missing(self, event: TrainerRegistered) -> list[Batch]:
        """Of the trainer's batches, those that are not over for good and have no record here, or
        only one from before groups were given back and others taken in."""
        over = max(self.mark, self._marking)
        return [b for b in event.batches if b.step > over and self._outdated(b)]

    def _outdated(self, brought: Batch) -> bool:
        known = self.batch(brought.step)
        if known is None:
            return True
        if brought.step in self.trained:
            return False
        if known.revision < brought.revision:
            return True
        return known.lacks > 0 and known.revision == brought.revision and not brought.lacks

    def lacking(self) -> list[int]:
        """Steps whose groups were given back and not replaced yet."""
        return sorted((*self.short, *self.returning))

    def _lost(self, step: int, brought: Collection[int] = ()) -> int:
        """The first step up to `step` without a composition, 0 when there is none."""
        steps = (s for s in range(self.mark + 1, step + 1) if s not in brought)
        return next((s for s in steps if self.batch(s) is None), 0)

    def _forgotten(self, step: int, revision: int | None) -> str:
        """What this bank lost of the steps up to `step`, "" when nothing shows it."""
        lost = self._lost(step)
        if lost:
            return f"this bank has no record of step {lost}"
        return self._other_revision(step, revision)

    def _other_revision(self, step: int, revision: int | None) -> str:
        """Why the batch is not what the trainer was sent, "" when nothing shows it: a trainer that
        is giving groups of it back says none. Records are lost from the newest back, so the newest
        batch that a trainer has tells of those before it."""
        known = self.batch(step)
        if known is None or revision is None or (known.revision == revision and not known.lacks):
            return ""
        if known.lacks:
            return f"as this bank has it, step {step} lacks groups that were given back"
        return f"this bank has revision {known.revision} of step {step}, the trainer {revision}"

    def _refused(self, event: TrainerRegistered) -> RefuseCall | None:
        older = self._older(event.call, event.epoch)
        return older or self._before_mark(event) or self._unlike(event)

    def _unlike(self, event: TrainerRegistered) -> RefuseCall | None:
        """Why the trainer's checkpoint and the records here cannot both be true, if so."""
        for batch in event.batches:
            known = self.batch(batch.step)
            if known and known.members != batch.members and not self._outdated(batch):
                return refusals.unlike(event.call, known, batch)
        last = event.last_durable_step
        brought = {b.step for b in self._missing(event)}
        lacking = (s for s in self.lacking() if s <= last and s not in brought)
        lost = self._lost(last, brought) or next(lacking, 0)
        return refusals.lost(event.call, last, lost) if lost else None

    def _before_mark(self, event: TrainerRegistered) -> RefuseCall | None:
        """Its lineage would need groups that are deleted."""
        last, mark = event.last_durable_step, max(self.mark, self._marking)
        return refusals.before_mark(event.call, last, mark) if last < mark else None

    def _older(self, call: str, epoch: int) -> RefuseCall | None:
        return refusals.fenced(call, epoch, self.epoch) if epoch < self.epoch else None

    def unknown_trainer(self, call: str, epoch: int) -> RefuseCall | None:
        if epoch < self.epoch:
            return refusals.fenced(call, epoch, self.epoch)
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
            return refuse(event.call, problem, event.step, way_out)
        # Without a registration the trainer's word is taken, as far as it fits what is frozen.
        if not self.registered:
            problem = self._forgotten(event.step - 1, event.former_revision)
            if problem:
                return refuse(event.call, problem, event.step, refusals.REGISTER)
        if self.registered and event.step > self.leased + 1:
            problem, way_out = "steps follow one another", f"ask for step {self.leased + 1}"
            return refuse(event.call, problem, event.step, way_out)
        open_steps = [s for s in self.frozen if s not in self.trained]
        if event.step > self.newest and len(open_steps) >= self.rules.unacknowledged_max:
            problem = f"{len(open_steps)} batches are leased and not acknowledged"
            return refuse(
                event.call,
                problem,
                event.step,
                f"acknowledge step {min(open_steps)}, or raise readybank.unacknowledged_max",
            )
        return None
