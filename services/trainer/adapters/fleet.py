"""The inference replicas of the run: who is there, what each serves, and the publication.

Owns: choosing whom to publish to, and the snapshots. Promise: a replica that serves the version
already is left alone, so publishing again is free; one that has started with other weights than the
newest published (it loads the newest durable checkpoint by itself, and is fenced then) is found and
sent them, also while the next step is trained; replicas that do not answer cost one deadline of a
call together.
Does not cover: the transfer (muster/transfer/publisher.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from muster import failpoints, rpc
from muster.errors import MusterError
from muster.registry import Entry, Registry
from muster.streams import reaching_redis
from muster.transfer.newest import Newest
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
        self._snapshots: Newest[Snapshot] = Newest()

    def take(self, state: dict[str, Any], version: int, parent: int) -> str:
        """See ports.Fleet."""
        self._snapshots.forget_old()  # before the next one takes its memory
        snapshot = Snapshot.take(state, version=version, parent=parent)
        self._snapshots.keep(version, snapshot)
        return snapshot.manifest.digest

    async def publish(self, version: int, parent: int, skip: Collection[str] = ()) -> Publication:
        """See ports.Fleet."""
        snapshot = self._snapshots.of(version)
        assert snapshot.manifest.parent == parent, "a version with two parents"
        with reaching_redis():
            entries = await self._registry.list("inference")
        async with asyncio.TaskGroup() as tasks:
            looks = [tasks.create_task(self._look(entry), name=entry.id) for entry in entries]
        states = [look.result() for look in looks]
        serving = sum(_serves(at, version) for at in states)
        stale = [
            (entry.id, entry.address)
            for entry, at in zip(entries, states, strict=True)
            if entry.id not in skip and _misses(at, version)
        ]
        if not stale:
            return Publication((), serving)
        found = await publish(
            snapshot,
            run=self._run,
            trainer_epoch=self._epoch,
            replicas=stale,
            settings=self._transfer,
            served_elsewhere=serving > 0,
            passing=lambda where: failpoints.at(_POINTS[where]),
        )
        reports = [_report(item) for item in found]
        return Publication(tuple(reports), serving + sum(item.serving for item in found))

    async def _look(self, entry: Entry) -> pb.GetReplicaStatusResponse | None:
        """None: no answer. It may only be slow: the publication fails it, and fences it."""
        try:
            return await self._status(entry)
        except MusterError:
            return None

    async def _status(self, entry: Entry) -> pb.GetReplicaStatusResponse:
        async with rpc.channel(entry.address) as channel:
            stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
            with rpc.calling(f"status of {entry.id}"):
                return await stub.GetReplicaStatus(
                    pb.GetReplicaStatusRequest(), timeout=self._transfer.call_timeout_s
                )


def _serves(at: pb.GetReplicaStatusResponse | None, version: int) -> bool:
    return at is not None and at.version == version and at.state == pb.REPLICA_STATE_SERVING


def _misses(at: pb.GetReplicaStatusResponse | None, version: int) -> bool:
    """It does not serve the version, and may be able to take it."""
    return at is None or (at.state in _TAKES_WEIGHTS and not _serves(at, version))


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
