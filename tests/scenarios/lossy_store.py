"""What Redis holds of a run as far as the bank is concerned, in memory: with everything that can go
wrong with it.

The newest records of the bank can be lost, as by a power cut with `appendfsync everysec`; the bank
can be killed before or after any single effect of a command. Entries get ids, payloads lie under
the keys that entries name, and a retired group takes no late entry, as in muster/streams.py. What
must never happen is kept in `conflicts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from muster.types import job_and_index
from services.readybank import events as e
from services.readybank.retire import group_of, keys_of

READ = ("versions", "jobs", "events", "outcomes")  # in the order of feeding at start
Effect = tuple[str, Any]


class Killed(Exception):
    """The bank's process ended here."""


class LossyStore:
    """The streams, payloads and keys of one run."""

    def __init__(self) -> None:
        self.effects_left: int | None = None  # then the bank is killed; None: never
        self.kill_after = False  # the last effect still happens
        self._log: list[Effect] = []
        self._number = 0
        self._clear()

    def _clear(self) -> None:
        self.streams: dict[str, list[Any]] = {name: [] for name in READ}
        self.archive: dict[str, list[Any]] = {name: [] for name in READ}
        self.batches: dict[int, e.Batch] = {}
        self.trained: set[int] = set()
        self.fates: dict[str, e.FateRecord] = {}
        self.mark, self.opened = 0, tuple[float, ...]()
        self.retired: set[str] = set()
        self.totals: dict[str, Counter[str]] = {}
        self.payloads: set[str] = set()
        self.conflicts: list[str] = []
        self.all_batches: dict[int, e.Batch] = {}  # trimmed or not
        self.all_fates: dict[str, e.FateRecord] = {}

    # What routers, trainers and people write

    def put(self, stream: str, event: Any) -> Any:
        """The entry with its id, None when its group takes none any more."""
        if stream in ("events", "outcomes") and group_of(event) in self.retired:
            return None
        if stream in ("events", "outcomes"):
            self._number += 1
            event = replace(event, id=f"{self._number}-0")
        self._do("put", (stream, event))
        return event

    # What the bank writes

    def write(self, command: e.BankCommand) -> e.BankEvent | None:
        """Carry out a command; its result."""
        for effect in self._effects(command):
            last = self._counted()
            if not last or self.kill_after:
                self._do(*effect)
            if last:
                raise Killed
        return _result(command)

    def _counted(self) -> bool:
        if self.effects_left is None:
            return False
        self.effects_left -= 1
        if self.effects_left > 0:
            return False
        self.effects_left = None
        return True

    def _effects(self, command: e.BankCommand) -> Iterator[Effect]:
        """The effects of a command that are atomic one by one."""
        if isinstance(command, e.WriteFrozen):
            yield "frozen", command.batch
        elif isinstance(command, e.WriteReturned):
            yield "returned", command
        elif isinstance(command, e.WriteTrained):
            yield "trained", command
        elif isinstance(command, e.WriteFate):
            yield "fate", command.fate
        elif isinstance(command, e.WriteMark):
            yield "mark", command
        elif isinstance(command, e.RetireGroups):
            yield from (("retire", group) for group in command.groups)
        elif isinstance(command, e.TrimStreams):
            for stream, first in (("events", command.events), ("outcomes", command.outcomes)):
                yield "archive", (stream, first)
                yield "trim", (stream, first)
            yield "trim_rest", command

    def lose(self, records: int) -> None:
        """The last `records` effects of the bank are gone."""
        log, left = self._log, records
        kept: list[Effect] = []
        for effect in reversed(log):
            if effect[0] != "put" and left:
                left -= 1
            else:
                kept.append(effect)
        self._log = []
        self._clear()
        for effect in reversed(kept):
            self._do(*effect)

    def recovery(self) -> list[e.BankEvent]:
        """What a bank that starts now reads, in the order in which it is fed."""
        mark = [e.MarkRestored(self.mark, self.opened)] if self.mark else []
        retired = [e.RetiredRestored(job, bits) for job, bits in sorted(self._bits().items())]
        batches = [e.BatchRestored(b, s in self.trained) for s, b in sorted(self.batches.items())]
        fates = [e.FateRestored(f.group, f.fate, f.reason) for f in self.fates.values()]
        read = [event for name in READ for event in self.streams[name]]
        return [*mark, *retired, *batches, *fates, *read, e.RecoveryEnded()]

    def _bits(self) -> dict[str, bytes]:
        found: dict[str, int] = {}
        for group in self.retired:
            job, index = job_and_index(group) or ("", 0)
            found[job] = found.get(job, 0) | 1 << (63 - index)
        return {job: bits.to_bytes(8, "big") for job, bits in found.items()}

    # Effects

    def _do(self, kind: str, what: Any) -> None:
        self._log.append((kind, what))
        getattr(self, f"_{kind}")(what)

    def _put(self, what: tuple[str, Any]) -> None:
        stream, event = what
        self.streams[stream].append(event)
        if stream == "events":
            self.payloads.update(keys_of(event))

    def _frozen(self, batch: e.Batch) -> None:
        if batch.step <= self.mark:
            self.conflicts.append(f"step {batch.step} was frozen again below the mark")
        known = self.batches.get(batch.step)
        if known and known != batch and not self._revises(batch, known):
            self.conflicts.append(f"step {batch.step} was frozen twice")
        self.batches[batch.step] = self.all_batches[batch.step] = batch

    def _revises(self, batch: e.Batch, known: e.Batch) -> bool:
        """It comes after `known`: others in the place of what was given back."""
        newer = (batch.revision, -batch.lacks) > (known.revision, -known.lacks)
        return newer and batch.step not in self.trained

    def _returned(self, command: e.WriteReturned) -> None:
        self._frozen(command.batch)
        for fate in command.fates:
            self._fate(fate)

    def _trained(self, command: e.WriteTrained) -> None:
        self.trained.add(command.batch.step)
        for fate in command.fates:
            self._fate(fate)

    def _fate(self, fate: e.FateRecord) -> None:
        self.all_fates.setdefault(fate.group, fate)
        if self.fates.setdefault(fate.group, fate) != fate or fate.group in self.retired:
            self.conflicts.append(f"group {fate.group} has two fates")

    def _mark(self, command: e.WriteMark) -> None:
        if not set(range(self.mark + 1, command.step + 1)) <= self.trained:
            self.conflicts.append(f"mark {command.step} is over steps that were not trained")
        self.mark, self.opened = command.step, command.opened

    def _retire(self, over: e.GroupOver) -> None:
        self.payloads.difference_update(over.keys)
        if over.group in self.retired:
            return
        fate = self.fates.get(over.group)
        if fate is None or fate.step > self.mark:
            self.conflicts.append(f"{over.group} was retired too early")
        self.retired.add(over.group)
        self.totals.setdefault(over.job, Counter()).update(over.totals)

    def _archive(self, what: tuple[str, str]) -> None:
        stream, first = what
        self.archive[stream] += [x for x in self.streams[stream] if _below(x, first)]

    def _trim(self, what: tuple[str, str]) -> None:
        stream, first = what
        for event in (x for x in self.streams[stream] if _below(x, first)):
            if group_of(event) not in self.retired:
                self.conflicts.append(f"{event} was trimmed before its group was retired")
        self.streams[stream] = [x for x in self.streams[stream] if not _below(x, first)]

    def _trim_rest(self, command: e.TrimStreams) -> None:
        self.batches = {s: b for s, b in self.batches.items() if s >= command.step}
        self.trained = {s for s in self.trained if s >= command.step}
        self.fates = {g: f for g, f in self.fates.items() if g not in self.retired}
        kept = [x for x in self.streams["versions"] if x.version >= command.version]
        self.streams["versions"] = kept or self.streams["versions"][-1:]


def _below(event: Any, first: str) -> bool:
    return bool(first) and int(event.id.partition("-")[0]) < int(first.partition("-")[0])


def _result(command: e.BankCommand) -> e.BankEvent | None:
    if isinstance(command, e.WriteFrozen):
        return e.BatchFrozen(command.batch.step)
    if isinstance(command, e.WriteReturned):
        return e.BatchReturned(command.batch.step)
    if isinstance(command, e.WriteTrained):
        return e.BatchTrained(command.batch.step)
    if isinstance(command, e.WriteFate):
        return e.FateWritten(command.fate.group)
    if isinstance(command, e.WriteMark):
        return e.MarkWritten(command.step)
    if isinstance(command, e.RetireGroups):
        return e.GroupsRetired(tuple(group.group for group in command.groups))
    return e.StreamsTrimmed() if isinstance(command, e.TrimStreams) else None
