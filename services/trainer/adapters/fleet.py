"""The inference replicas of the run: who is there, what each serves, and the publication.

Owns: choosing whom to publish to, and the snapshots. Promise: a replica that serves the version
already is left alone, so publishing again is free; one that has started with other weights than the
newest published (it loads the newest durable checkpoint by itself, and is fenced then) is found and
sent them, also while the next step is trained; replicas that do not answer cost one deadline of a
call together.
Does not cover: the transfer (muster/transfer/publisher.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from muster import failpoints
from muster.registry import Registry
from muster.streams import reaching_redis
from muster.transfer.newest import Newest
from muster.transfer.publisher import ReplicaPublication, TransferSettings, publish
from muster.transfer.replicas import look, newest
from muster.transfer.snapshot import Snapshot
from services.trainer.ports import Publication, ReplicaReport

_POINTS = {
    "prepare.before": "trainer.prepare.before",
    "prepare.after": "trainer.prepare.after",
    "commit.before": "trainer.commit.before",
    "commit.after": "trainer.commit.after",
}


class InferenceFleet:
    """See ports.Fleet."""

    def __init__(self, registry: Registry, *, run: str, epoch: int, transfer: TransferSettings):
        self._registry, self._run, self._epoch = registry, run, epoch
        self._transfer = transfer
        self._snapshots: Newest[Snapshot] = Newest()

    def take(self, state: dict[str, Any], version: int, parent: int) -> str:
        """See ports.Fleet."""
        self._snapshots.forget_old(version)  # before this one takes its memory
        snapshot = Snapshot.take(state, version=version, parent=parent)
        self._snapshots.keep(version, snapshot)
        return snapshot.manifest.digest

    async def newest(self) -> int:
        """See ports.Fleet."""
        with reaching_redis():
            entries = await self._registry.list("inference")
        return await newest(entries, timeout_s=self._transfer.call_timeout_s)

    async def publish(self, version: int, parent: int, skip: Collection[str] = ()) -> Publication:
        """See ports.Fleet."""
        snapshot = self._snapshots.of(version)
        assert snapshot.manifest.parent == parent, "a version with two parents"
        with reaching_redis():
            entries = await self._registry.list("inference")
        stale, serving, left_alone = await look(
            entries, version, skip=skip, timeout_s=self._transfer.call_timeout_s
        )
        if not stale:
            return Publication((), serving)
        found = await publish(
            snapshot,
            run=self._run,
            trainer_epoch=self._epoch,
            replicas=stale,
            settings=self._transfer,
            serving=serving,
            left_alone=left_alone,
            passing=lambda where: failpoints.at(_POINTS[where]),
        )
        reports = [_report(item) for item in found]
        return Publication(tuple(reports), serving + sum(item.serving for item in found))


def _report(item: ReplicaPublication) -> ReplicaReport:
    return ReplicaReport(
        replica=item.replica,
        latency_s=item.latency_s,
        pause_s=item.pause_s,
        token_gap_s=item.token_gap_s,
        receive_s=item.receive_s,
        apply_s=item.apply_s,
        requests_recomputed=item.requests_recomputed,
        tokens_lost=item.tokens_lost,
        requests_finished=item.requests_finished,
        requests_aborted=item.requests_aborted,
        requests_kept=item.requests_kept,
        error=item.error,
    )
