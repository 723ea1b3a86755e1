"""The bank: whole groups into frozen batches, for one trainer at a time.

Owns: every group of the run, its fate, and every batch. Promises: a group stands in at most one
batch, whole, with one attempt a sibling; a batch is durable before anything of it is sent, and is
sent again unchanged; one fate a group; only the newest owner epoch of each stream counts.
Does not cover: the wire and the streams (driver.py).

At start the same events are fed from the streams: restored batches and fates first, then versions
and cancelled jobs, then groups and labels. Nothing depends on how the two streams interleave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from muster.types import Fate
from services.readybank import events as e
from services.readybank.admission import Verdict, admit
from services.readybank.assembly import EpisodeEvent, GroupAssembly
from services.readybank.batch import choose
from services.readybank.lease import Leases, told
from services.readybank.lineage import Lineage

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
        self._groups: dict[str, GroupAssembly] = {}
        self._ready: dict[str, float] = {}  # admitted and in no batch → completion time
        self._held: dict[str, tuple[float, str]] = {}  # complete, not admitted yet → since, why
        self._open: set[str] = set()  # without a fate and in no batch
        self._cancelled: set[str] = set()
        self._owner: Counter[str] = Counter()  # newest owner epoch seen, by stream
        self._lineage = Lineage()
        self._leases = Leases(rules)
        self._moved = 0.0  # when something last progressed
        self._told = 0.0
        self._unreadable = ""  # the newest entry that could not be read
        self._handlers: dict[type[Any], Callable[[Any, float], list[e.BankCommand]]] = {
            e.GroupOpened: self._on_opened,
            e.TurnRecorded: self._on_episode,
            e.EpisodeRecorded: self._on_episode,
            e.LabelRecorded: self._on_episode,
            e.VersionSeen: self._on_version,
            e.JobCancelled: self._on_cancelled,
            e.TrainerRegistered: self._on_registered,
            e.LeaseAsked: self._on_asked,
            e.LeaseGone: self._on_gone,
            e.AckAsked: self._on_ack,
            e.BatchFrozen: self._on_frozen,
            e.BatchTrained: self._on_trained,
            e.BatchRestored: self._on_batch_restored,
            e.FateRestored: self._on_fate_restored,
            e.TrainerEpochRestored: self._on_trainer_epoch,
            e.EntryLeftOut: self._on_left_out,
            e.Tick: self._on_tick,
        }

    def handle(self, event: e.BankEvent, now: float) -> list[e.BankCommand]:
        """One event in, decisions out. `now`: seconds, steady."""
        commands = self._handlers[type(event)](event, now)
        if not isinstance(event, e.Tick | e.EntryLeftOut):
            self._moved = now
        return commands + self._serve()

    # Groups

    def _group(self, group: str) -> GroupAssembly:
        if group not in self._groups:
            self._groups[group] = GroupAssembly(group)
            self._open.add(group)
        return self._groups[group]

    def _fenced(self, stream: str, owner_epoch: int) -> bool:
        """A stream is in the order of its writers' epochs: an older one is a former owner."""
        if owner_epoch < self._owner[stream]:
            self.refused[FENCED] += 1
            return True
        self._owner[stream] = owner_epoch
        return False

    def _on_opened(self, event: e.GroupOpened, now: float) -> list[e.BankCommand]:
        if self._fenced("events", event.owner_epoch):
            return []
        return self._taken(event.group, self._group(event.group).open(event), now)

    def _on_episode(self, event: EpisodeEvent, now: float) -> list[e.BankCommand]:
        stream = "outcomes" if isinstance(event, e.LabelRecorded) else "events"
        if self._fenced(stream, event.episode.owner_epoch):
            return []
        group = event.episode.group
        return self._taken(group, self._group(group).take(event), now)

    def _taken(self, group: str, refused: str, now: float) -> list[e.BankCommand]:
        if refused:
            self.refused[refused] += 1
            return []
        return self._consider(group, now)

    def _consider(self, group: str, now: float) -> list[e.BankCommand]:
        """Where a group without a fate stands after something about it changed."""
        if group not in self._open:
            return []
        known = self._groups[group]
        self._ready.pop(group, None)
        since, _ = self._held.pop(group, (now, ""))
        if known.opened and known.opened.job in self._cancelled:
            return self._filter(group, "job_cancelled")
        if known.missing(self.rules.repairs_max):
            return []
        admission = admit(known.members(), self.rules, self._lineage)
        if admission.verdict is Verdict.FILTER:
            return self._filter(group, admission.reason)
        if admission.verdict is Verdict.ADMIT:
            self._ready[group] = known.complete_unix_s
        elif now - since >= self.rules.version_wait_s:
            return self._filter(group, admission.reason)
        else:
            self._held[group] = (since, admission.reason)
        return []

    def _filter(self, group: str, reason: str) -> list[e.BankCommand]:
        self._close(group)
        return [e.WriteFate(e.FateRecord(group, Fate.FILTERED, reason=reason))]

    def _close(self, group: str) -> None:
        self._group(group).close()
        self._forget(group)

    def _forget(self, group: str) -> None:
        self._open.discard(group)
        self._ready.pop(group, None)
        self._held.pop(group, None)

    def _on_version(self, event: e.VersionSeen, now: float) -> list[e.BankCommand]:
        if not self._lineage.see(event.version, event.parent, published=event.published):
            return []
        return self._consider_all(sorted({*self._held, *self._ready}), now)

    def _on_cancelled(self, event: e.JobCancelled, now: float) -> list[e.BankCommand]:
        self._cancelled.add(event.job)
        return self._consider_all(sorted(self._open), now)

    def _consider_all(self, groups: list[str], now: float) -> list[e.BankCommand]:
        return [command for group in groups for command in self._consider(group, now)]

    # The trainer

    def _on_registered(self, event: e.TrainerRegistered, now: float) -> list[e.BankCommand]:
        commands: list[e.BankCommand] = []
        brought = self._leases.brought(event)
        if brought:
            twice = [m.group for m in brought.members if self._in_a_batch(m.group)]
            if twice:
                return [self._refuse_twice(event.call, brought, twice[0])]
            self._freeze(brought)
            commands.append(e.WriteFrozen(brought))
        steps, answers = self._leases.register(event)
        return [*commands, *self._write_trained(steps), *answers]

    def _in_a_batch(self, group: str) -> bool:
        known = self._groups.get(group)
        return known is not None and known.pinned is not None

    def _refuse_twice(self, call: str, batch: e.Batch, group: str) -> e.RefuseCall:
        return e.RefuseCall(
            call,
            f"group {group} of the checkpoint's step {batch.step} stands in another batch here",
            "last_batch",
            told(batch),
            "restore checkpoints and Redis data that belong together, or start a new run",
        )

    def _freeze(self, batch: e.Batch) -> None:
        self._pin(batch)
        self._leases.freeze(batch)

    def _on_asked(self, event: e.LeaseAsked, now: float) -> list[e.BankCommand]:
        self._told = now
        return [*self._leases.ask(event)]

    def _on_gone(self, event: e.LeaseGone, now: float) -> list[e.BankCommand]:
        self._leases.gone(event.call)
        return []

    def _on_ack(self, event: e.AckAsked, now: float) -> list[e.BankCommand]:
        steps, answers = self._leases.acknowledge(event)
        return [*self._write_trained(steps), *answers]

    def _write_trained(self, steps: list[int]) -> list[e.BankCommand]:
        commands: list[e.BankCommand] = []
        for step in steps:
            batch = self._leases.frozen[step]
            # One fate a group: one that was filtered while this batch's record was lost has its.
            fates = tuple(
                e.FateRecord(m.group, Fate.TRAINED, step)
                for m in batch.members
                if not self._groups[m.group].filtered
            )
            commands.append(e.WriteTrained(batch, fates))
        return commands

    def _on_frozen(self, event: e.BatchFrozen, now: float) -> list[e.BankCommand]:
        return self._write_trained(self._leases.froze(event.step))

    def _on_trained(self, event: e.BatchTrained, now: float) -> list[e.BankCommand]:
        return [*self._leases.ended(event.step)]

    def _serve(self) -> list[e.BankCommand]:
        """Freeze the batch that is waited for, or send it when it is durable."""
        commands: list[e.BankCommand] = []
        wanted = self._leases.wants()
        chosen = choose(self._ready, wanted.groups) if wanted else ()
        if wanted and chosen:
            batch = e.Batch(
                step=wanted.step,
                members=tuple(e.BatchMember(g, self._attempts(g)) for g in chosen),
                asked_unix_s=wanted.asked_unix_s,
                complete_unix_s=max(self._ready[g] for g in chosen),
                trainer_epoch=self._leases.epoch,
                policy_version=self._lineage.published,
            )
            self._freeze(batch)
            commands.append(e.WriteFrozen(batch))
        due = self._leases.due()
        if due:
            commands.append(self._send(due[0].call, due[1]))
        return commands

    def _attempts(self, group: str) -> tuple[int, ...]:
        return tuple(attempt.number for attempt in self._groups[group].members())

    def _pin(self, batch: e.Batch) -> None:
        for member in batch.members:
            self._group(member.group).pin(member.attempts)
            self._forget(member.group)

    def _send(self, call: str, batch: e.Batch) -> e.BankCommand:
        groups = [self._groups[m.group] for m in batch.members]
        for group in groups:
            missing = group.missing(repairs_max=0)  # pinned attempts are final, whatever they are
            if missing:
                return e.RefuseCall(
                    call,
                    f"the streams no longer hold {missing} of group {group.group}",
                    "step",
                    str(batch.step),
                    "restore the Redis data of this run, or start a new run",
                )
        return e.SendBatch(call, batch, tuple(group.leased() for group in groups))

    # Start and time

    def _on_batch_restored(self, event: e.BatchRestored, now: float) -> list[e.BankCommand]:
        self._pin(event.batch)
        self._leases.frozen[event.batch.step] = event.batch
        self._leases.epoch = max(self._leases.epoch, event.batch.trainer_epoch)
        if event.trained:
            self._leases.trained.add(event.batch.step)
        return []

    def _on_fate_restored(self, event: e.FateRestored, now: float) -> list[e.BankCommand]:
        if event.fate is Fate.FILTERED:
            group = self._group(event.group)
            group.filtered = True
            if group.pinned is None:  # else a checkpoint has it, and the batch may be sent again
                self._close(event.group)
        return []

    def _on_trainer_epoch(self, event: e.TrainerEpochRestored, now: float) -> list[e.BankCommand]:
        self._leases.epoch = max(self._leases.epoch, event.epoch)
        return []

    def _on_left_out(self, event: e.EntryLeftOut, now: float) -> list[e.BankCommand]:
        self.refused[UNREADABLE] += 1
        self._unreadable = f"{event.stream} {event.id}"
        return []

    def _on_tick(self, event: e.Tick, now: float) -> list[e.BankCommand]:
        commands = self._consider_all(sorted(self._held), now)
        if commands:
            self._moved = now
        waiting = self._leases.waiting
        quiet = now - max(self._moved, self._told)
        if waiting is not None and quiet >= self.rules.stall_s:
            self._told = now
            problem = f"step {waiting.step} waits for {waiting.groups} groups: {self.waits_for()}"
            left_out = self.refused[UNREADABLE]
            if left_out:
                problem += f"; {left_out} unreadable entries left out, newest {self._unreadable}"
            commands.append(e.TellStall(problem))
        return commands

    def waits_for(self) -> str:
        """For people: how many groups stand where, and what the first open one lacks."""
        held, ready = len(self._held), len(self._ready)
        text = f"{ready} ready, {held} held, {len(self._open) - held - ready} open"
        if self._held:
            group = min(self._held)
            return f"{text}; {group} is held: {self._held[group][1]}"
        for group in sorted(self._open - self._ready.keys()):
            return (
                f"{text}; {group} waits for {self._groups[group].missing(self.rules.repairs_max)}"
            )
        return text
