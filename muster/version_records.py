"""A trainer's entries in the versions stream of its run.

Owns: writing them, and writing them again. Promise: appended under the trainer's epoch, so a former
trainer is refused, and once per (version, stage); what a restarted server may have lost is written
again, and what it kept stays as it is. Does not cover: the numbers (version_line.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from muster.clock import wall
from muster.seat import Seat
from muster.streams import RunStreams, StreamEntry, reaching_redis, version_record
from muster.v1 import events_pb2 as ev
from muster.version_line import Known

RECORDS_KEPT = 64  # that can be written again: more than a second brings about


class VersionRecords:
    """Of one trainer. `newest`: the record of its version as it was sealed."""

    def __init__(self, seat: Seat):
        self._redis = seat.redis
        self._streams = RunStreams(seat.redis, seat.run, role="trainer", epoch=seat.epoch)
        self._written: deque[ev.PolicyVersionRecord] = deque(maxlen=RECORDS_KEPT)
        self._server = ""
        self.newest = ev.PolicyVersionRecord()

    async def known(self) -> dict[int, Known]:
        """Every version ever recorded."""
        self._server = await self._process()
        records = map(version_record, await self._streams.read_all("versions"))
        return {r.version: Known(r.parent, r.digest) for r in records if r and r.parent < r.version}

    async def sealed(self, record: ev.PolicyVersionRecord) -> None:
        """A version has its number and digest."""
        await self._write(record)
        self.newest = record

    async def published(self, publications: Iterable[ev.PublicationReport]) -> None:
        """The newest version is served."""
        record = self._like_newest(ev.VERSION_STAGE_PUBLISHED, "")
        record.publications.extend(publications)
        await self._write(record)

    async def durable(self, checkpoint: str) -> None:
        """The newest version is in that folder."""
        await self._write(self._like_newest(ev.VERSION_STAGE_DURABLE, checkpoint))

    async def look_at_server(self) -> None:
        """Write again what another process of the server may lack. Raises Unavailable, Fenced."""
        process = await self._process()
        if process != self._server:
            for record in tuple(self._written):
                await self._append(record)
            self._server = process

    def _like_newest(
        self, stage: ev.VersionStage.ValueType, checkpoint: str
    ) -> ev.PolicyVersionRecord:
        record = ev.PolicyVersionRecord()
        record.CopyFrom(self.newest)
        record.stage, record.checkpoint = stage, checkpoint
        return record

    async def _write(self, record: ev.PolicyVersionRecord) -> None:
        record.at_unix_s = wall()
        await self._append(record)
        self._written.append(record)

    async def _append(self, record: ev.PolicyVersionRecord) -> None:
        dedupe = f"{record.version}/{record.stage}"
        entry = StreamEntry("versions", "versions", dedupe, record.SerializeToString())
        await self._streams.append([entry])

    async def _process(self) -> str:
        info: Mapping[str, Any] = {}
        with reaching_redis():
            info = await self._redis.info("server")
        return str(info["run_id"])
