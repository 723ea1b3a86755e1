"""What groups that are over leave in Redis, and when it goes.

Owns: the payload keys, totals and first entries of each group that is not retired; which groups
are; the order of the work. Promises: a group is retired once and after its fate is durable; an
entry of a retired group changes nothing, and the payload it names goes too; a stream is trimmed
only below the first entry of every group that is not retired, and below what was read. Does not
cover: the effects (adapters/clearing.py). Of versions, batches and fates it says what is over; that
is looked for where they lie.

Nothing here needs a record of its own: after a crash between any two effects the same is found
again in the bits of the retired groups, the mark and the streams, and done again.

A group is named JOB-INDEX by the router. One that is not (or whose entries have no ids) is never
retired, and what came after its first entry stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from muster.stream_ids import id_order
from muster.types import Fate, OutcomeLabel, Value, job_and_index
from services.readybank import events as e

KEYS_AT_ONCE = 10_000
VERSIONS_KEPT = 32
"""A replica that missed publications may sample under a version older than the newest published
one when the group was opened, by so many numbers."""

Entry = e.GroupOpened | e.TurnIntended | e.TurnRecorded | e.EpisodeRecorded | e.LabelRecorded


class VersionKept(Value, frozen=True):
    """An entry of the versions stream. `stage`: 0 when no trainer wrote it."""

    id: str
    version: int
    stage: int


def newest_of_stages(versions: Iterable[VersionKept]) -> frozenset[str]:
    """Ids of the newest entry of each stage: replicas and the trainer go on from them."""
    newest: dict[int, VersionKept] = {}
    for found in sorted(versions, key=lambda v: (v.version, id_order(v.id))):
        newest[found.stage] = found
    return frozenset(found.id for found in newest.values())


def version_over(found: VersionKept, first_kept: int, newest: frozenset[str]) -> bool:
    """Nothing is sampled under it any more, and nobody starts from it."""
    return not found.stage or (found.version < first_kept and found.id not in newest)


def batch_over(step: int, mark: int) -> bool:
    """A later step is trained for good."""
    return step < mark


def fate_over(group: str, gone: Callable[[str], bool]) -> bool:
    """Of a group that is retired, or of none."""
    return not group or gone(group)


class Retired:
    """One bit for each group of each job."""

    def __init__(self) -> None:
        self._bits: dict[str, bytearray] = {}

    def restore(self, job: str, bits: bytes) -> None:
        self._bits[job] = bytearray(bits)

    def __contains__(self, group: str) -> bool:
        found = job_and_index(group)
        if found is None:
            return False
        job, index = found
        bits = self._bits.get(job, b"")
        return index // 8 < len(bits) and bool(bits[index // 8] & (0x80 >> index % 8))

    def add(self, job: str, index: int) -> None:
        bits = self._bits.setdefault(job, bytearray())
        bits.extend(bytes(max(0, index // 8 + 1 - len(bits))))
        bits[index // 8] |= 0x80 >> index % 8


@dataclass
class Remains:
    """What is known of one group for the day on which it goes."""

    version: int = 0  # published when it was opened
    keys: dict[str, None] = field(default_factory=dict)
    turns: dict[tuple[int, int], int] = field(default_factory=dict)  # by sibling, attempt
    labels: dict[tuple[int, int], OutcomeLabel] = field(default_factory=dict)
    whole: bool = True  # all its entries have ids

    def see(self, event: Entry) -> None:
        self.whole = self.whole and bool(event.id)
        if isinstance(event, e.GroupOpened):
            self.version = event.opened_at_version
            return
        self.keys.update(dict.fromkeys(keys_of(event)))
        where = (event.episode.sibling, event.episode.attempt)
        if isinstance(event, e.EpisodeRecorded):
            self.turns.setdefault(where, event.turns)
        elif isinstance(event, e.LabelRecorded):
            self.labels.setdefault(where, event.label)

    def totals(self, fate: Fate, repairs_max: int) -> dict[str, int]:
        """Counted as the router counts the attempts of a job."""
        found = Counter({str(fate): 1})
        for (sibling, attempt), label in self.labels.items():
            again = not label.outcome.valid and attempt < repairs_max
            found["episodes"] += 1
            found["turns"] += self.turns.get((sibling, attempt), 0)
            found["repairs"] += again + label.replays
            found[f"outcome:{label.outcome}"] += 1
        return {name: found[name] for name in sorted(found) if found[name]}


def keys_of(event: Entry) -> list[str]:
    """The payload keys that an entry names."""
    if isinstance(event, e.TurnRecorded):
        return [key for key in (event.payload_key, event.output_key) if key]
    if isinstance(event, e.TurnIntended) and event.payload_key:
        return [event.payload_key]
    return []


def group_of(event: Entry) -> str:
    return event.group if isinstance(event, e.GroupOpened) else event.episode.group


class Retiring:
    """The work left of one run. One RetireGroups and one TrimStreams are under way at most."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._retired = Retired()
        self._remains: dict[str, Remains] = {}
        self._first: dict[str, dict[str, str]] = {"events": {}, "outcomes": {}}
        self._newest = {"events": "", "outcomes": ""}
        self._due: dict[str, tuple[Fate, int]] = {}
        self._late: dict[str, list[str]] = {}
        self._under_way: tuple[str, ...] = ()
        self._late_under_way = False
        self._trimming = False
        self._trimmed = e.TrimStreams("", "", 0, 0)  # as far as is known
        self.restore = self._retired.restore

    def gone(self, group: str) -> bool:
        """Retired, or being retired."""
        return group in self._retired

    def note(self, event: Entry) -> bool:
        """Take an entry in; False when its group is gone and nothing else of it counts."""
        stream = "outcomes" if isinstance(event, e.LabelRecorded) else "events"
        group = group_of(event)
        self._newest[stream] = event.id or self._newest[stream]
        if not getattr(self._trimmed, stream):
            self._trimmed = replace(self._trimmed, **{stream: event.id})
        if self.gone(group):
            keys = keys_of(event)
            if keys:
                self._late.setdefault(group, []).extend(keys)
            return False
        self._remains.setdefault(group, Remains()).see(event)
        self._first[stream].setdefault(group, event.id)
        return True

    def over(self, group: str, fate: Fate, repairs_max: int) -> None:
        """Its fate is durable and it is never leased again."""
        remains = self._remains.get(group)
        if remains and remains.whole and job_and_index(group) and not self.gone(group):
            self._due.setdefault(group, (fate, repairs_max))

    def next(self) -> e.RetireGroups | None:
        """What to do now, if anything; those groups are gone from now on."""
        if self._under_way or not (self._due or self._late):
            return None
        groups: list[e.GroupOver] = []
        keys, self._late_under_way = 0, bool(self._late)
        while (self._due or self._late) and len(groups) < self._at_once and keys < KEYS_AT_ONCE:
            groups.append(self._take_late() if self._late else self._take_due())
            keys += len(groups[-1].keys)
        self._under_way = tuple(group.group for group in groups)
        return e.RetireGroups(tuple(groups))

    def _take_due(self) -> e.GroupOver:
        group = next(iter(self._due))
        fate, repairs_max = self._due.pop(group)
        remains = self._remains.pop(group)
        job, index = job_and_index(group) or ("", 0)
        self._retired.add(job, index)
        totals = remains.totals(fate, repairs_max)
        return e.GroupOver(group, job, index, totals, tuple(remains.keys))

    def _take_late(self) -> e.GroupOver:
        group = next(iter(self._late))
        job, index = job_and_index(group) or ("", 0)
        return e.GroupOver(group, job, index, {}, tuple(self._late.pop(group)))

    def done(self, groups: Iterable[str]) -> None:
        """Nothing holds their entries any more."""
        self._under_way, self._late_under_way = (), False
        for group in groups:
            for first in self._first.values():
                first.pop(group, None)

    def trim(self, step: int, published: int) -> e.TrimStreams | None:
        """What may go now, when that is more than the last time."""
        events, outcomes = (self._first_kept(stream) for stream in ("events", "outcomes"))
        floor = min((r.version for r in self._remains.values()), default=published)
        version = max(0, min(floor, published) - VERSIONS_KEPT)
        wanted = e.TrimStreams(events, outcomes, step, version)
        if self._trimming or self._late or self._late_under_way or not events:
            return None
        if wanted == self._trimmed:
            return None
        self._trimming, self._trimmed = True, wanted
        return wanted

    def _first_kept(self, stream: str) -> str:
        return next(iter(self._first[stream].values()), self._newest[stream])

    def trimmed(self) -> None:
        self._trimming = False
