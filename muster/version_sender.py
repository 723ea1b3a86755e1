"""A sealed version to the replicas of its run.

Owns: `VersionSender`, `Published`. Promise: one report for each replica that was tried; one that
keeps failing is told of ever more seldom. Does not cover: the transfer (transfer/publisher.py), the
records (version_records.py), when to send (publish.py).
"""

from __future__ import annotations

from collections.abc import Collection

from muster import telemetry
from muster.errors import Unavailable
from muster.seat import Seat
from muster.streams import reaching_redis
from muster.transfer.publisher import ReplicaPublication, TransferSettings, publish
from muster.transfer.replicas import look, newest
from muster.transfer.snapshot import Snapshot
from muster.types import Value
from muster.version_line import Tries

_log = telemetry.logger("muster.publish")


class Published(Value, frozen=True):
    """What became of a version. `serving` counts the replicas that serve it now."""

    version: int
    digest: str
    serving: int
    reports: tuple[ReplicaPublication, ...]

    @property
    def failed(self) -> tuple[ReplicaPublication, ...]:
        """Replicas that did not take it: they serve nothing until they do, and are tried again."""
        return tuple(report for report in self.reports if report.error)


class VersionSender:
    """From one trainer incarnation. `tries`: see version_line.py."""

    def __init__(self, seat: Seat, transfer: TransferSettings):
        self._seat, self._transfer = seat, transfer
        self.tries = Tries()

    async def newest(self) -> int:
        """The highest version that a replica says it serves. Raises Unavailable."""
        with reaching_redis():
            entries = await self._seat.registry.list("inference")
        return await newest(entries, timeout_s=self._transfer.call_timeout_s)

    async def bring(self, version: Snapshot, skip: Collection[str] = ()) -> Published:
        """To every listed replica that serves another one, but those in `skip`.

        Raises Unavailable when Redis is away, Fenced when a newer trainer was there.
        """
        manifest, seat = version.manifest, self._seat
        with reaching_redis():
            entries = await seat.registry.list("inference")
        stale, serving, left_alone = await look(
            entries, manifest.version, skip=skip, timeout_s=self._transfer.call_timeout_s
        )
        found = await publish(
            version,
            run=seat.run,
            trainer_epoch=seat.epoch,
            replicas=stale,
            settings=self._transfer,
            serving=serving,
            left_alone=left_alone,
        )
        told = self.tries.took((item.replica, item.serving) for item in found)
        for item in found:
            if item.replica in told:
                _log.warning("%s misses version %d: %s", item.replica, manifest.version, item.error)
        serving += sum(item.serving for item in found)
        return Published(manifest.version, manifest.digest, serving, tuple(found))

    def nobody_there(self, version: int, waited_s: float) -> Unavailable:
        """To be raised when no replica has announced itself."""
        return Unavailable(
            f"no replica has announced itself within {waited_s:.0f} s, so version {version} is "
            "served by none",
            field="run",
            value=self._seat.run,
            way_out="start one; it is sent this version as soon as it is there",
        )

    def nobody_took(self, done: Published) -> Unavailable:
        """To be raised when all that are there failed."""
        errors = "; ".join(f"{report.replica}: {report.error}" for report in done.failed)
        return Unavailable(
            f"no replica took version {done.version} ({errors})",
            field="run",
            value=self._seat.run,
            way_out="all go on with what they serve; they are tried again in a while",
        )
