"""The bank: whole groups into frozen batches, for one trainer at a time.

Owns: every group of the run, its fate, and every batch. Promises: a group stands in at most one
batch, whole, with one attempt a sibling; a batch is durable before anything of it is sent, and is
sent again unchanged; one fate a group; only the newest owner epoch of each stream counts.
What is over for good is forgotten, here and in Redis (retire.py). Does not cover: the wire and the
streams (driver.py).

At start the same events are fed from the streams: the mark and the retired groups first, then
batches and fates, versions and cancelled jobs, groups and labels, and that it was all. Nothing
depends on how the streams of groups and labels interleave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from muster.types import Fate
from services.readybank import composing, restoring
from services.readybank import events as e
from services.readybank.admission import Verdict, admit
from services.readybank.assembly import CLOSED, EpisodeEvent, GroupAssembly
from services.readybank.batch import Overtaken, Ready
from services.readybank.drift import Decision, Drifts
from services.readybank.evaluated import evaluated
from services.readybank.explain import stall
from services.readybank.lease import Leases
from services.readybank.ledger import Ledger
from services.readybank.lineage import Lineage
from services.readybank.registering import register
from services.readybank.retire import Retiring
from services.readybank.returning import give_back

_NO_PROGRESS = (e.Tick, e.EntryLeftOut, e.LeaseAsked, e.LeaseGone)
FENCED, UNREADABLE = "fenced", "unreadable"


class BankMachine:
    """See the module. `refused` counts events that did not count, by reason."""

    name: ClassVar[str] = "readybank"
    rules_type: ClassVar[Any] = e.BankRules
    event_type: ClassVar[Any] = e.BankEvent
    tick_type: ClassVar[Any] = e.Tick

    def __init__(self, rules: e.BankRules):
        self.rules = rules
        self.refused: Counter[str] = Counter()
        self.groups: dict[str, GroupAssembly] = {}
        self.ready: dict[str, Ready] = {}  # admitted and in no batch
        self.held: dict[str, tuple[float, str]] = {}  # complete, not admitted yet → since, why
        self.open: set[str] = set()  # without a fate and in no batch
        self.leases = Leases(rules)
        self.retiring = Retiring(rules.retire_at_once)
        self._cancelled: set[str] = set()
        self._owner: Counter[str] = Counter()  # newest owner epoch seen, by stream
        self.lineage = Lineage()
        self.ledger = Ledger(self.lineage)
        self.drifts = Drifts(rules, self.lineage, self.ledger)
        self.overtaken = Overtaken(rules.fairness_batches)
        self._recovered = self._heard = False
        self._moved = 0.0  # when something last progressed
        self._told, self._asked_step = 0.0, 0
        self._unreadable = ""  # the newest entry that could not be read
        self._handlers: dict[type[Any], Callable[[Any, float], list[e.BankCommand]]] = {
            e.GroupOpened: self._on_opened,
            e.TurnIntended: self._on_episode,
            e.TurnRecorded: self._on_episode,
            e.EpisodeRecorded: self._on_episode,
            e.LabelRecorded: self._on_episode,
            e.VersionSeen: self._on_version,
            e.JobCancelled: self._on_cancelled,
            e.TrainerRegistered: self._on_registered,
            e.LeaseAsked: self._on_asked,
            e.LeaseGone: self._on_gone,
            e.AckAsked: self._on_ack,
            e.ReturnAsked: self._on_return_asked,
            e.BatchReturned: self._on_returned,
            e.GroupScored: self._on_scored,
            e.ScoreMissed: self._on_score_missed,
            e.BatchFrozen: self._on_frozen,
            e.BatchTrained: self._on_trained,
            e.FateWritten: self._on_fate_written,
            e.MarkWritten: self._on_mark_written,
            e.GroupsRetired: self._on_retired,
            e.StreamsTrimmed: self._on_trimmed,
            e.MarkRestored: self._on_mark_restored,
            e.RetiredRestored: self._on_retired_restored,
            e.RecoveryEnded: self._on_recovery_ended,
            e.BatchRestored: self._on_batch_restored,
            e.FateRestored: self._on_fate_restored,
            e.TrainerEpochRestored: self._on_trainer_epoch,
            e.EntryLeftOut: self._on_left_out,
            e.Tick: self._on_tick,
        }

    def handle(self, event: e.BankEvent, now: float) -> list[e.BankCommand]:
        """One event in, decisions out. `now`: seconds, steady."""
        commands = self._handlers[type(event)](event, now)
        if not isinstance(event, _NO_PROGRESS):
            self._moved = now
        served, score = composing.serve(self), self.drifts.next()
        return [*commands, *served, *([score] if score else []), *self._clear()]

    # Groups

    def group(self, group: str) -> GroupAssembly:
        if group not in self.groups:
            self.groups[group] = GroupAssembly(group)
            self.open.add(group)
        return self.groups[group]

    def _fenced(self, stream: str, owner_epoch: int) -> bool:
        """A stream is in the order of its writers' epochs: an older one is a former owner."""
        if owner_epoch < self._owner[stream]:
            self.refused[FENCED] += 1
            return True
        self._owner[stream] = owner_epoch
        return False

    def _on_opened(self, event: e.GroupOpened, now: float) -> list[e.BankCommand]:
        if self._fenced("events", event.owner_epoch) or self._late(event):
            return []
        return self._taken(event.group, self.group(event.group).open(event), now)

    def _on_episode(self, event: EpisodeEvent, now: float) -> list[e.BankCommand]:
        stream = "outcomes" if isinstance(event, e.LabelRecorded) else "events"
        if self._fenced(stream, event.episode.owner_epoch) or self._late(event):
            return []
        group = event.episode.group
        return self._taken(group, self.group(group).take(event), now)

    def _late(self, event: e.GroupOpened | EpisodeEvent) -> bool:
        """Take note of the entry; True when its group is gone."""
        if self.retiring.note(event):
            return False
        self.refused[CLOSED] += 1
        return True

    def _taken(self, group: str, refused: str, now: float) -> list[e.BankCommand]:
        if refused:
            self.refused[refused] += 1
            return []
        return self._consider(group, now)

    def _consider(self, group: str, now: float) -> list[e.BankCommand]:
        """Where a group without a fate stands after something about it changed."""
        if group not in self.open:
            return []
        known = self.groups[group]
        self.ready.pop(group, None)
        since, _ = self.held.pop(group, (now, ""))
        if known.opened and known.opened.job in self._cancelled:
            return self.filter(group, "job_cancelled")
        rules = known.rules(self.rules)
        if known.missing(rules.repairs_max):
            return []
        if known.evaluates:
            return self._evaluated(known)
        admission = admit(known.members(), rules, self.lineage)
        if admission.verdict is Verdict.FILTER:
            return self.filter(group, admission.reason)
        if admission.verdict is Verdict.ADMIT:
            return self._drifted(known, since, now)
        if now - since >= self.rules.version_wait_s:
            return self.filter(group, admission.reason)
        self.held[group] = (since, admission.reason)
        return []

    def _drifted(self, known: GroupAssembly, since: float, now: float) -> list[e.BankCommand]:
        """Admissible in all else."""
        found = self.drifts.judge(known, now)
        if found.decision is Decision.REFUSE:
            return self.filter(known.group, found.reason, found.predicted_kl, found.scored_kl)
        if found.decision is Decision.WAIT:
            self.held[known.group] = (since, found.reason)
        else:
            self.ready[known.group] = Ready(known.complete_unix_s, known.opened_unix_s)
        return []

    def filter(
        self, group: str, reason: str, predicted: float | None = None, scored: float | None = None
    ) -> list[e.BankCommand]:
        self.close(group, Fate.FILTERED)
        self.groups[group].reason = reason
        fate = e.FateRecord(
            group, Fate.FILTERED, reason=reason, predicted_kl=predicted, scored_kl=scored
        )
        return [e.WriteFate(fate)]

    def _evaluated(self, known: GroupAssembly) -> list[e.BankCommand]:
        found = evaluated(known)
        self.close(known.group, Fate.EVALUATED)
        return [e.WriteFate(e.FateRecord(known.group, Fate.EVALUATED), found)]

    def close(self, group: str, fate: Fate) -> None:
        self.group(group).close(fate)
        self._forget(group)

    def _forget(self, group: str) -> None:
        self.open.discard(group)
        self.ready.pop(group, None)
        self.held.pop(group, None)
        self.drifts.leave(group)

    def _on_version(self, event: e.VersionSeen, now: float) -> list[e.BankCommand]:
        moved = self.lineage.see(event.version, event.parent, published=event.published)
        self.ledger.see(event.version, event.step_kl)
        if not moved:
            return []
        return self._consider_all(sorted({*self.held, *self.ready}), now)

    def _on_cancelled(self, event: e.JobCancelled, now: float) -> list[e.BankCommand]:
        self._cancelled.add(event.job)
        return self._consider_all(sorted(self.open), now)

    def _consider_all(self, groups: list[str], now: float) -> list[e.BankCommand]:
        return [command for group in groups for command in self._consider(group, now)]

    def _on_scored(self, event: e.GroupScored, now: float) -> list[e.BankCommand]:
        self.drifts.scored(event)
        return self._consider(event.group, now)

    def _on_score_missed(self, event: e.ScoreMissed, now: float) -> list[e.BankCommand]:
        self.drifts.missed(event.group)
        return self._consider(event.group, now)

    # The trainer

    def _on_registered(self, event: e.TrainerRegistered, now: float) -> list[e.BankCommand]:
        return register(self, event)

    def freeze(self, batch: e.Batch) -> None:
        self.pin(batch)
        self.leases.freeze(batch)

    def _on_asked(self, event: e.LeaseAsked, now: float) -> list[e.BankCommand]:
        if event.step != self._asked_step:  # one that is asked for again waits as long as before
            self._asked_step, self._told = event.step, now
        return [*self.leases.ask(event)]

    def _on_gone(self, event: e.LeaseGone, now: float) -> list[e.BankCommand]:
        self.leases.gone(event.call)
        return []

    def _on_ack(self, event: e.AckAsked, now: float) -> list[e.BankCommand]:
        steps, answers = self.leases.acknowledge(event)
        return [*self.write_trained(steps), *answers]

    def write_trained(self, steps: list[int]) -> list[e.BankCommand]:
        commands: list[e.BankCommand] = []
        for step in steps:
            batch = self.leases.frozen[step]
            # One fate a group: one that was filtered while this batch's record was lost has its.
            fates = tuple(
                e.FateRecord(m.group, Fate.TRAINED, step)
                for m in batch.members
                if not self.groups[m.group].filtered
            )
            commands.append(e.WriteTrained(batch, fates))
        return commands

    def _on_frozen(self, event: e.BatchFrozen, now: float) -> list[e.BankCommand]:
        return self.write_trained(self.leases.froze(event.step))

    def _on_trained(self, event: e.BatchTrained, now: float) -> list[e.BankCommand]:
        return [*self.leases.ended(event.step)]

    def _on_return_asked(self, event: e.ReturnAsked, now: float) -> list[e.BankCommand]:
        wanted, answer = give_back(self.leases, event)
        if wanted is None:
            return [answer] if answer else []
        # One fate a group: one that was filtered while this batch's record was lost has its.
        fates = tuple(f for f in wanted.fates if not self.groups[f.group].filtered)
        for fate in wanted.fates:
            self.close(fate.group, Fate.FILTERED)
            self.groups[fate.group].reason = fate.reason
        return [e.WriteReturned(wanted.batch, fates)]

    def _on_returned(self, event: e.BatchReturned, now: float) -> list[e.BankCommand]:
        answers = self.leases.returned(event.step)
        for group in self.leases.short[event.step].returned:
            self._on_fate_written(e.FateWritten(group), now)
        return [*answers]

    def pin(self, batch: e.Batch) -> None:
        for member in batch.members:
            if not self.retiring.gone(member.group):
                self.group(member.group).pin(member.attempts)
                self._forget(member.group)

    # What is over

    def _clear(self) -> list[e.BankCommand]:
        """The next piece of clearing up, when there is any."""
        if not self._recovered:
            return []
        if self.leases.heard and not self._heard:
            # Not before: a trainer may bring a batch whose record was lost, with groups that were
            # filtered since.
            self._heard = True
            self._dropped_over(evaluates=False)
        commands: list[e.BankCommand] = []
        step = self.leases.markable()
        if step:
            opened = self.overtaken.mark(step, lambda s: composing.opened_in(self, s))
            commands.append(e.WriteMark(step, opened))
        retire = self.retiring.next()
        if retire:
            for over in retire.groups:
                self.groups.pop(over.group, None)
                self._forget(over.group)
                self.drifts.forget(over.group)
            commands.append(retire)
        return commands

    def _on_fate_written(self, event: e.FateWritten, now: float) -> list[e.BankCommand]:
        known = self.groups.get(event.group)
        if known:
            known.told = True
            if known.dropped and (self._heard or known.evaluates):
                self._over(known)
        return []

    def _on_mark_written(self, event: e.MarkWritten, now: float) -> list[e.BankCommand]:
        for batch in self.leases.marked(event.step):
            for member in batch.members:
                known = self.groups.get(member.group)
                if known:
                    self._over(known)
        return []

    def _over(self, known: GroupAssembly) -> None:
        fate, repairs_max = known.fate or Fate.TRAINED, known.rules(self.rules).repairs_max
        self.retiring.over(known.group, fate, repairs_max)

    def _dropped_over(self, *, evaluates: bool) -> None:
        for known in [g for g in self.groups.values() if g.dropped and g.evaluates == evaluates]:
            self._over(known)

    def _on_retired(self, event: e.GroupsRetired, now: float) -> list[e.BankCommand]:
        self.retiring.done(event.groups)
        return []

    def _on_trimmed(self, event: e.StreamsTrimmed, now: float) -> list[e.BankCommand]:
        self.retiring.trimmed()
        return []

    # Start and time

    def _on_mark_restored(self, event: e.MarkRestored, now: float) -> list[e.BankCommand]:
        restoring.mark(self, event)
        return []

    def _on_retired_restored(self, event: e.RetiredRestored, now: float) -> list[e.BankCommand]:
        self.retiring.restore(event.job, event.bits)
        return []

    def _on_recovery_ended(self, event: e.RecoveryEnded, now: float) -> list[e.BankCommand]:
        self._recovered = True
        self._dropped_over(evaluates=True)
        return self._on_mark_written(e.MarkWritten(self.leases.mark), now)

    def _on_batch_restored(self, event: e.BatchRestored, now: float) -> list[e.BankCommand]:
        restoring.batch(self, event)
        return []

    def _on_fate_restored(self, event: e.FateRestored, now: float) -> list[e.BankCommand]:
        restoring.fate(self, event)
        return []

    def _on_trainer_epoch(self, event: e.TrainerEpochRestored, now: float) -> list[e.BankCommand]:
        self.leases.epoch = max(self.leases.epoch, event.epoch)
        return []

    def _on_left_out(self, event: e.EntryLeftOut, now: float) -> list[e.BankCommand]:
        self.refused[UNREADABLE] += 1
        self._unreadable = f"{event.stream} {event.id}"
        return []

    def _on_tick(self, event: e.Tick, now: float) -> list[e.BankCommand]:
        commands = self._consider_all(sorted(self.held), now)
        if commands:
            self._moved = now
        trim = self.retiring.trim(self.leases.mark, self.lineage.published)
        if trim:
            self.lineage.forget(trim.version)
            self.ledger.forget(trim.version)
            commands.append(trim)
        waiting = self.leases.waiting
        quiet = now - max(self._moved, self._told)
        if waiting is not None and quiet >= self.rules.stall_s:
            self._told = now
            left_out = self.refused[UNREADABLE]
            commands.append(e.TellStall(stall(self, waiting, left_out, self._unreadable)))
        return commands
