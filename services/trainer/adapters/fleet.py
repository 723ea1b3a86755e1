"""The inference replicas of the run: who is there, what each serves, and the publication.

Owns: choosing whom to publish to. Promise: a replica that serves the version already is left alone,
so publishing again is free; one that has started with other weights than the newest published (it
loads the newest durable checkpoint by itself, and is fenced then) is found and sent them.
Does not cover: the transfer (muster/transfer/publisher.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from muster import failpoints, rpc
from muster.background import in_daemon
from muster.errors import MusterError
from muster.registry import Entry, Registry
from muster.streams import reaching_redis
from muster.transfer.publisher import ReplicaPublication, TransferSettings, publish
from muster.transfer.snapshot import Snapshot
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import InferenceServiceStub
from services.trainer.ports import Publication, ReplicaReport

if TYPE_CHECKING:
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_POINTS = {
    "prepare.before": "trainer.prepare.before",
    "prepare.after": "trainer.prepare.after",
    "commit.before": "trainer.commit.before",
    "commit.after": "trainer.commit.after",
}
_TAKES_WEIGHTS = (pb.REPLICA_STATE_SERVING, pb.REPLICA_STATE_FENCED)


class InferenceFleet:
    """See ports.Fleet."""

    def __init__(self, registry: Registry, *, run: str, epoch: int, transfer: TransferSettings):
        self._registry, self._run, self._epoch = registry, run, epoch
        self._transfer = transfer
        self._snapshot: Snapshot | None = None  # of the newest version: copied and hashed once

    def digest(self, state: dict[str, Any], version: int, parent: int) -> str:
        """See ports.Fleet."""
        self._snapshot = Snapshot.take(state, version=version, parent=parent)
        return self._snapshot.manifest.digest

    async def publish(
        self, state: dict[str, Any], version: int, parent: int, skip: Collection[str] = ()
    ) -> Publication:
        """See ports.Fleet."""
        stale: list[tuple[str, str]] = []
        serving = 0
        with reaching_redis():
            entries = await self._registry.list("inference")
        for entry in entries:
            try:
                status = await self._status(entry)
            except MusterError:
                # It may only have been slow to answer: the publication fails it, and fences it.
                if entry.id not in skip:
                    stale.append((entry.id, entry.address))
                continue
            if status.version == version and status.state == pb.REPLICA_STATE_SERVING:
                serving += 1
            elif status.state in _TAKES_WEIGHTS and entry.id not in skip:
                stale.append((entry.id, entry.address))
        if not stale:
            return Publication((), serving)
        found = await publish(
            await self._of(state, version, parent),
            run=self._run,
            trainer_epoch=self._epoch,
            replicas=stale,
            settings=self._transfer,
            served_elsewhere=serving > 0,
            passing=lambda where: failpoints.at(_POINTS[where]),
        )
        reports = [_report(item) for item in found]
        return Publication(tuple(reports), serving + sum(item.serving for item in found))

    async def _of(self, state: dict[str, Any], version: int, parent: int) -> Snapshot:
        """That version's; taken now where it was loaded and not made here."""
        known = self._snapshot
        if known is None or (known.manifest.version, known.manifest.parent) != (version, parent):
            known = await in_daemon(
                lambda: Snapshot.take(state, version=version, parent=parent), "snapshot"
            )
            self._snapshot = known
        return known

    async def _status(self, entry: Entry) -> pb.GetReplicaStatusResponse:
        async with rpc.channel(entry.address) as channel:
            stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
            with rpc.calling(f"status of {entry.id}"):
                return await stub.GetReplicaStatus(
                    pb.GetReplicaStatusRequest(), timeout=self._transfer.call_timeout_s
                )


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
