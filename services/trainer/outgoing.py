"""Versions on their way to the replicas: which is sent next, who is tried when.

Owns: the choice of what is sent, the replicas that missed it, the PUBLISHED records. Promise: one
publication at a time, and one that was begun ends (its deadline bounds it): were it cut for a newer
version, a trainer that is quicker than the line would leave all replicas with the oldest for ever.
What follows it is the newest version; those between are superseded and never sent. So to each
replica versions come in order. A version is sent after its record is written, and none is begun
while any record is still to be written: not before the PUBLISHED record of the one before, nor
before a restarted store has all of them again. Does not cover: how weights travel
(muster/transfer), what the trainer does meanwhile (schedule.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from muster.types import Value
from services.trainer.events import Command, Publish, Published, RecordVersion
from services.trainer.lineage import NO_PARENT
from services.trainer.ports import PublicationTimes, ReplicaReport, Stage, VersionRecord

MISSED_DUES_MAX = 12  # with the default of one ReplicasDue in 5 s: a minute


class Missed(Value, frozen=True):
    """A replica that has not taken the newest version: how often in a row it was tried, the error
    of the last try, and at which ReplicasDue it is tried again."""

    tries: int
    report: ReplicaReport
    again: int


class _Sending(Value, frozen=True):
    record: VersionRecord
    began: float
    skipped: tuple[str, ...]
    over: bool = False  # but for its record


class Outgoing:
    """See the module. To be read: `sending` (version under way), `behind` (versions made whose
    publication has not ended), `missed` (by replica). To be set: `to_write` (records asked for that
    are not written).

    A replica that keeps failing is tried ever more seldom, at last every `MISSED_DUES_MAX`
    ReplicasDue; a new version is tried at once.
    """

    def __init__(self) -> None:
        self.missed: dict[str, Missed] = {}
        self._newest: VersionRecord | None = None
        self._waiting: dict[int, tuple[float, float]] = {}  # version → when made, busy until then
        self._sending: _Sending | None = None
        self._dues = 0  # ReplicasDue so far
        self.to_write = 0

    @property
    def sending(self) -> int | None:
        sent = self._sending
        return None if sent is None or sent.over else sent.record.version

    @property
    def behind(self) -> int:
        return len(self._waiting)

    def made(self, record: VersionRecord, now: float, busy_s: float) -> None:
        """A version's record is written: it is new, or it has become durable. `busy_s`: seconds
        trained so far."""
        if self._newest is None or record.version != self._newest.version:
            self._waiting[record.version] = (now, busy_s)
            self.missed = {}
        self._newest = record

    def next(self, now: float) -> list[Command]:
        """Begin with the newest version that was never sent, unless one is under way."""
        return self._begin(now) if self._waiting else []

    def look(self, now: float) -> list[Command]:
        """A ReplicasDue: send the newest version to whoever has not got it."""
        self._dues += 1
        return self._begin(now)

    def _begin(self, now: float) -> list[Command]:
        if self._sending is not None or self._newest is None or self.to_write:
            return []
        record = self._newest
        skipped = tuple(name for name, known in self.missed.items() if self._dues < known.again)
        self._sending = _Sending(record, now, skipped)
        return [Publish(record.version, record.parent, skipped)]

    def ended(self, event: Published, now: float, busy_s: float) -> list[Command]:
        """The publication under way ended: its record, if anybody serves it, or what is next."""
        assert self._sending is not None, "a publication that was not begun"
        sent, self._sending = self._sending, None
        version = sent.record.version
        made_at, busy_before = self._waiting.get(version, (sent.began, busy_s))
        self._waiting = {v: at for v, at in self._waiting.items() if v > version}
        if self._newest is not None and self._newest.version == version:
            self._note_missed(event.reports, sent.skipped)
        served = any(not report.error for report in event.reports)
        # Found served by a former incarnation, which may have ended before the record.
        inherited = event.serving > 0 and sent.record.parent != NO_PARENT
        if not served and not inherited:
            return self.next(now)
        self._sending = replace(sent, over=True)
        times = PublicationTimes(
            waited_s=sent.began - made_at,
            took_s=now - sent.began,
            trained_meanwhile_s=busy_s - busy_before,
        )
        record = replace(
            sent.record, stage=Stage.PUBLISHED, publications=event.reports, times=times
        )
        return [RecordVersion(record)]

    def recorded(self, version: int, now: float) -> list[Command]:
        """A version's PUBLISHED record is written: what is next."""
        sent = self._sending
        if sent is not None and sent.over and sent.record.version == version:
            self._sending = None
        return self.next(now)

    def _note_missed(self, reports: Sequence[ReplicaReport], skipped: Sequence[str]) -> None:
        """One that was tried without a report has gone, or serves the version; one that was to be
        left alone was tried all the same if it has a report."""
        untried = {*skipped} - {report.replica for report in reports}
        kept = {name: missed for name, missed in self.missed.items() if name in untried}
        for report in reports:
            if report.error:
                known = self.missed.get(report.replica)
                tries = known.tries + 1 if known else 1
                wait = min(2 ** (tries - 1), MISSED_DUES_MAX)
                kept[report.replica] = Missed(tries, report, self._dues + wait)
        self.missed = kept
