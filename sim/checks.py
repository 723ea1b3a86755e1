"""What must hold after every event of a simulation: the invariants of DESIGN §5.

Owns: a record of all that became durable, taken from the store's own appends, and what is checked
at each. Promise: looks at streams, boxes and at what the trainer got, never into a machine; each
fact is looked at once. Does not cover: the content of leased batches (leased.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from muster import codec
from muster.streams import Received, StreamEntry
from muster.types import Fate, Outcome, OutcomeLabel, job_and_index
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from sim.box import DumbBox
from sim.facts import Attempt, Facts
from sim.host import Host
from sim.led import Shared
from sim.models import Model
from sim.trainer import Checkpoint, Trainer
from sim.work import evaluates

HEAP_MAX = 50_000


class Violation(AssertionError):
    """An invariant does not hold."""


class Checks:
    """Call it after every event; raises Violation."""

    def __init__(self, shared: Shared, model: Model, trainer: Trainer, hosts: Sequence[Host]):
        self.shared, self.model, self.trainer, self.hosts = shared, model, trainer, hosts
        self.facts = Facts()
        self.problems: list[str] = []
        self.gaps = False  # a power cut has taken records: what follows a gap is no fault
        self.versions_lost: set[int] = set()  # by a power cut that the trainer has not heard of
        self._boxes: dict[str, DumbBox] = {}
        shared.store.hears.append(self._on_append)
        shared.store.retires.append(self._on_retire)
        shared.store.trims.append(self._on_trim)
        trainer.on_save = self._on_save
        for host in hosts:
            host.on_run = self._on_run

    def __call__(self) -> None:
        for host in self.hosts:
            if host.count > self.model.boxes_max:
                self.problems.append(f"9: {host.name} has {host.count} boxes")
        if self.shared.world.pending > HEAP_MAX:
            self.problems.append("12: what is under way grows without bound")
        if self.problems:
            raise Violation(self.problems[0])

    def power_cut(self) -> None:
        """The store has lost its last second: what is durable is what it has now."""
        self.gaps = True
        known = len(self.problems)
        retired = {group for group in self.facts.retired if self._is_retired(group)}
        self.versions_lost |= self.facts.versions.keys()
        self.facts = Facts(retired=retired)
        self.shared.truth.finished.clear()
        live = [m for stream in self.shared.store.streams.values() for m in stream]
        kept = {(m.stream, m.id): m for m in (*self.shared.archive, *live)}
        for stream in ("versions", "events", "outcomes", "batches", "evaluations", "fates"):
            for message in kept.values():
                if message.stream == stream:
                    self._take(message)
        del self.problems[known:]  # of facts that were checked when they came

    def _is_retired(self, group: str) -> bool:
        job, index = job_and_index(group) or (group, 0)
        return index in self.shared.store.bits.get(f"retired:{job}", ())

    def of_record(self, version: int) -> bool:
        """It is, or a power cut took the record and the trainer has not heard of that yet."""
        if version in self.facts.versions:
            return True
        return version in self.versions_lost and self.trainer.knows != self.shared.server.life

    # boxes

    def _on_run(self, box: DumbBox, turn: int) -> None:
        self._boxes[box.name] = box
        if box.executed[turn] > 1:
            self.problems.append(f"11: turn {turn} ran {box.executed[turn]} times in {box.name}")
        if any(t >= turn for t, _ in box.commands[:-1]):
            self.problems.append(f"11: turn {turn} ran in {box.name} after a later one")

    def rewards(self, episode: str) -> set[float]:
        """What verifiers truly said of an attempt."""
        return {r for host in self.hosts for r in host.verdicts.get(episode, ())}

    # streams

    def _on_append(self, message: Received, entry: StreamEntry) -> None:
        del entry
        role, epoch = self.shared.store.writer
        if role and epoch != self.shared.store.epoch(role):
            self.problems.append(f"3: {message.stream} took an entry of the former {role} {epoch}")
        self._take(message)

    def _take(self, message: Received) -> None:
        match message.stream:
            case "events":
                self._trajectory(ev.TrajectoryEvent.FromString(message.data))
            case "outcomes":
                self._label(ev.OutcomeLabel.FromString(message.data))
            case "fates":
                self._fate(ev.GroupFate.FromString(message.data))
            case "batches":
                self._batch(ev.BatchRecord.FromString(message.data))
            case "evaluations":
                self._evaluated(ev.EvaluatedGroup.FromString(message.data))
            case "versions":
                record = ev.PolicyVersionRecord.FromString(message.data)
                parent = self.facts.versions.setdefault(record.version, record.parent)
                if record.stage == ev.VERSION_STAGE_PUBLISHED:
                    self.facts.published_step = max(self.facts.published_step, record.step.step)
                if parent != record.parent:
                    self.problems.append(f"5: version {record.version} has two parents")

    def _attempt(self, where: str, key: Message) -> Attempt:
        """The attempt that an entry is of, checked against its siblings' attempts (3)."""
        known = codec.key_from_pb(key)  # type: ignore[arg-type]
        attempts = self.facts.siblings.setdefault((known.group, known.sibling), {})
        newest = max(attempts, default=-1)
        if known.owner_epoch != self.shared.store.epoch("router"):
            self.problems.append(f"3: {where} of owner {known.owner_epoch} was taken")
        if known.attempt < newest:
            self.problems.append(f"3: {where} is of an older attempt than {newest}")
        if known.attempt > newest:
            self._begins(where, known.attempt, attempts)
        return attempts.setdefault(known.attempt, Attempt())

    def _begins(self, where: str, number: int, attempts: dict[int, Attempt]) -> None:
        """A new attempt follows one that ended invalid, and repairs are bounded (1, 12)."""
        before = attempts.get(number - 1)
        if number > self.model.repairs_max:
            self.problems.append(f"12: {where} is attempt {number}")
        if self.gaps and before is not None and before.turns_total != len(before.turns):
            return  # a power cut took a turn of it: nobody can train on that
        if number and (before is None or before.label is None or before.label.outcome.valid):
            self.problems.append(f"1: {where} begins though attempt {number - 1} was not lost")

    def _trajectory(self, event: ev.TrajectoryEvent) -> None:
        kind = event.WhichOneof("event")
        group = event.episode.group
        if kind == "group_opened":
            if group in self.facts.opened:
                self.problems.append(f"2: group {group} was opened twice")
            self.facts.opened[group] = event.group_opened
            return
        where = f"{group}.{event.episode.sibling}.{event.episode.attempt} {kind} {event.seq}"
        if group not in self.facts.opened or group in self.facts.retired:
            self.problems.append(f"2: {where} of a group that is not open")
        attempt = self._attempt(where, event.episode)
        if attempt.label is not None or attempt.turns_total is not None:
            self.problems.append(f"2: {where} after its end")
        self._of_attempt(where, kind, attempt, event)

    def _of_attempt(
        self, where: str, kind: str | None, attempt: Attempt, event: ev.TrajectoryEvent
    ) -> None:
        self._intervals(where, getattr(event, kind or "turn_finished"))
        if kind == "turn_finished":
            self._turn(where, attempt, event.turn_finished)
        elif kind == "turn_intended":
            turn = event.turn_intended.turn
            skipped = turn != len(attempt.turns) and not self.gaps
            if turn in attempt.intents or turn in attempt.turns or skipped:
                self.problems.append(f"11: {where} is intended twice, or out of order")
            attempt.intents.add(turn)
        elif kind == "box_restored":
            attempt.restored += 1
            if event.box_restored.repair != attempt.restored and not self.gaps:
                self.problems.append(f"2: {where} is counted as {event.box_restored.repair}")
            if attempt.restored > self.model.repairs_max:
                self.problems.append(f"12: {where} is rebuilt {attempt.restored} times")
        else:
            attempt.turns_total = event.episode_finished.turns
            if attempt.turns_total != len(attempt.turns) and not self.gaps:
                self.problems.append(f"1: {where} has {len(attempt.turns)} turns")

    def _intervals(self, where: str, message: Any) -> None:
        """A clock that jumps makes none shorter than nothing or longer than the world."""
        for interval in getattr(message, "intervals", ()):
            lasted = interval.end_unix_s - interval.start_unix_s
            held = interval.state == pb.EPISODE_STATE_HOLD  # from one router to the next
            if not held and not 0.0 <= lasted <= self.shared.world.now + 0.001:
                self.problems.append(f"4: {where} has an interval of {lasted:.1f} s")

    def _turn(self, where: str, attempt: Attempt, turn: ev.TurnFinished) -> None:
        skipped = turn.turn != len(attempt.turns) and not self.gaps
        if turn.turn in attempt.turns or skipped:
            self.problems.append(f"2: {where} is there already, or out of order")
        attempt.turns[turn.turn] = turn
        self.shared.truth.finished.add((where.partition(" ")[0], turn.turn))
        if not turn.command:
            return
        if turn.turn not in attempt.intents and not self.gaps:
            self.problems.append(f"11: {where} ran without an intent")
        box = self._boxes.get(turn.box)
        if box is not None and (turn.turn, turn.command) not in box.commands:
            self.problems.append(f"11: {where} never ran in {turn.box}")
        there = self.gaps or turn.payload_key in self.shared.store.values
        if turn.payload_key and not there:
            short = turn.payload_key
            self.problems.append(f"1: {where} names {short}, which is not there")

    def _label(self, message: ev.OutcomeLabel) -> None:
        key, label = codec.key_from_pb(message.episode), codec.label_from_pb(message)
        attempt = self._attempt(f"label of {key.id}", message.episode)
        if attempt.label is not None:
            self.problems.append(f"2: {key.id} has two labels")
        attempt.label = label
        self.facts.labels[f"{label.outcome}/{label.cause}"] += 1
        self._cause(key.id, label)
        rewards = self.rewards(key.id)
        if label.outcome is Outcome.MODEL_SUCCESS and 1.0 not in rewards:
            self.problems.append(f"4: {key.id} is a success that no verifier saw")
        judged = label.cause in ("not_passed", "budget_turns", "budget_tokens", "budget_time")
        if label.outcome is Outcome.MODEL_FAILURE and judged and label.reward not in rewards:
            self.problems.append(f"4: {key.id} is a failure that no verifier saw")

    def _cause(self, episode: str, label: OutcomeLabel) -> None:
        """What the label blames really happened."""
        truth = self.shared.truth
        acted = truth.acted[episode]
        if label.cause in ("budget_time", "host_starved") and acted < self.model.episode_s:
            self.problems.append(f"4: {episode} is {label.cause} and acted for {acted:.1f} s")
        if label.cause == "command_kills_hosts" and truth.killed(episode) < 2:
            died = truth.killed(episode)
            self.problems.append(f"4: {episode} kills hosts, of which {died} died")

    def _fate(self, message: ev.GroupFate) -> None:
        fate = codec.fate_from_pb(message.fate)
        known = self.facts.fates.setdefault(message.group, fate)
        if known is not fate:
            self.problems.append(f"2: {message.group} is {known} and {fate}")
        if fate is Fate.TRAINED and self.facts.step_of.get(message.group) != message.step:
            self.problems.append(f"2: {message.group} is trained in a step that has it not")
        if fate is not Fate.TRAINED and message.group in self.facts.step_of:
            self.problems.append(f"2: {message.group} is {fate} and in a batch")
        if (fate is Fate.EVALUATED) != evaluates(message.group):
            self.problems.append(f"2: {message.group} is {fate}")

    def _evaluated(self, found: ev.EvaluatedGroup) -> None:
        """Once, of the newest attempts, each of which has its label."""
        if self.facts.evaluated.setdefault(found.group, found) is not found:
            self.problems.append(f"2: {found.group} was evaluated twice")
        opened = self.facts.opened.get(found.group)
        if opened is None or len(found.siblings) != opened.group_size:
            self.problems.append(f"2: {found.group} was evaluated with {len(found.siblings)}")
        for one in found.siblings:
            known = self.facts.siblings.get((found.group, one.sibling), {})
            label = known[one.attempt].label if one.attempt == max(known, default=-1) else None
            if label is None or codec.outcome_to_pb(label.outcome) != one.outcome:
                where = f"{found.group}.{one.sibling}.{one.attempt}"
                self.problems.append(f"3: {where} was evaluated, and that is not what it is")

    def _batch(self, record: ev.BatchRecord) -> None:
        if record.stage == ev.BATCH_STAGE_RETURNED:
            self._returned(record)
            return
        known = self.facts.frozen.get(record.step)
        if known is None or known.revision < record.revision:
            self._revised(record)
            known = self.facts.frozen[record.step] = record
        if list(known.members) != list(record.members):
            self.problems.append(f"2: step {record.step} has two compositions")
        if record.stage == ev.BATCH_STAGE_TRAINED:
            self.facts.trained.add(record.step)
            if all(c.step < record.step for c in self.trainer.saved_ever):
                self.problems.append(f"2: step {record.step} is trained, and in no checkpoint")
        elif known is record:
            self._frozen(record)

    def _returned(self, record: ev.BatchRecord) -> None:
        """What stays is of the batch as it was; what went is in no batch, and in no checkpoint."""
        where, known = f"step {record.step}", self.facts.frozen.pop(record.step, None)
        self.facts.short[record.step] = record
        stays = [m.group for m in record.members]
        had = [m.group for m in known.members] if known else []
        if record.step in self.facts.trained:
            self.problems.append(f"2: {where} is trained, and groups of it were given back")
        if not self.gaps and (known is None or known.revision + 1 != record.revision):
            self.problems.append(f"2: groups of {where} were given back before it was whole")
        if known and [g for g in had if g not in record.returned] != stays:
            self.problems.append(f"2: {where} had {had}, and what stays is {stays}")
        for group in record.returned:
            self.facts.step_of.pop(group, None)

    def _revised(self, record: ev.BatchRecord) -> None:
        """It comes after what stayed of it, and has all of that."""
        short = self.facts.short.pop(record.step, None)
        brought = self.gaps and any(c.step >= record.step for c in self.trainer.saved_ever)
        former = short or self.facts.frozen.get(record.step)
        for member in former.members if former else ():
            self.facts.step_of.pop(member.group, None)
        if brought or not record.revision:
            return
        stays = list(short.members) if short else []
        whole = short is not None and (short.revision, short.groups) == (
            record.revision,
            len(record.members),
        )
        if not whole or list(record.members)[: len(stays)] != stays:
            self.problems.append(f"2: step {record.step} was not topped up from what stayed of it")

    def _frozen(self, record: ev.BatchRecord) -> None:
        if len(record.members) != self.model.groups_per_batch:
            self.problems.append(f"2: step {record.step} has {len(record.members)} groups")
        # What was trained stays trained: a trainer brings it though a power cut took its labels.
        brought = self.gaps and any(c.step >= record.step for c in self.trainer.saved_ever)
        for member in record.members:
            where = f"{member.group} in step {record.step}"
            if evaluates(member.group):
                self.problems.append(f"2: {where} is of an evaluation")
            if member.group in self.facts.step_of:
                self.problems.append(f"2: {where} is in step {self.facts.step_of[member.group]}")
            if brought:
                self.facts.step_of[member.group] = record.step
                continue
            if member.group in self.facts.fates:
                self.problems.append(f"2: {where} had its fate before")
            self.facts.step_of[member.group] = record.step
            opened = self.facts.opened.get(member.group)
            if opened is None or len(member.attempts) != opened.group_size:
                self.problems.append(f"2: {where} has {len(member.attempts)} siblings")
            for sibling, number in enumerate(member.attempts):
                known = self.facts.siblings.get((member.group, sibling), {})
                if number != max(known, default=-1) or known[number].label is None:
                    self.problems.append(
                        f"3: {where}: attempt {number} of {sibling} does not count"
                    )

    # the end of groups

    def _on_save(self, checkpoint: Checkpoint) -> None:
        steps = [batch.step for batch in checkpoint.trained]
        if steps != list(range(1, checkpoint.step + 1)):
            self.problems.append(f"2: the checkpoint of step {checkpoint.step} has steps {steps}")
        for batch in checkpoint.trained:
            known = self.facts.frozen.get(batch.step)
            if known and known.revision != batch.revision and not self.gaps:
                told = f"revision {batch.revision} of step {batch.step}, not {known.revision}"
                self.problems.append(f"2: the checkpoint of step {checkpoint.step} has {told}")
        groups = [m.group for batch in checkpoint.trained for m in batch.members]
        if len(groups) != len(set(groups)):
            twice = next(g for g, n in Counter(groups).items() if n > 1)
            self.problems.append(f"2: {twice} was trained twice in one lineage")

    def _on_retire(self, group: str, keys: Sequence[str]) -> None:
        del keys
        self.facts.retired.add(group)
        fate = self.facts.fates.get(group)
        if fate is None:
            self.problems.append(f"1: {group} was retired before its fate was durable")
        if fate is Fate.TRAINED and self.facts.step_of[group] > self.trainer.told_oldest:
            told = f"the trainer may go back to step {self.trainer.told_oldest}"
            self.problems.append(f"1: {group} was retired, and {told}")

    def _on_trim(self, stream: str, gone: Sequence[Received]) -> None:
        kept = {m.id for m in self.shared.archive if m.stream == stream}
        for message in gone:
            if message.id not in kept:
                self.problems.append(f"1: {stream} {message.id} was trimmed and not archived")
            group = _group_of(message)
            if group and group not in self.facts.retired:
                self.problems.append(f"1: {stream} lost an entry of {group}, which is not over")


def _group_of(message: Received) -> str:
    if message.stream == "events":
        return ev.TrajectoryEvent.FromString(message.data).episode.group
    if message.stream == "outcomes":
        return ev.OutcomeLabel.FromString(message.data).episode.group
    return ""
