"""One policy version from the trainer to every replica: prepare, transfer, verify, commit.

Owns: `publish`, the trainer's whole interface to the engines. Promises: whatever dies or hangs, all
is over within `timeout_s` and the moment (`_GRACE_S`) in which replicas are told to drop it; each
membership has a generation of its own, never used again; a replica that fails costs only itself
(its error is in its report, and it was told to drop what it had, and to serve nothing if the
version is served elsewhere); a replica is reported as serving only after it said so. Any trainer
may use it.
Does not cover: which replicas there are (the registry), checkpoints, version records; a replica
that cannot be reached cannot be told: it goes on with its old version until a publication finds it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from muster import rpc, telemetry
from muster.background import in_daemon
from muster.clock import monotonic
from muster.errors import Fenced, MusterError, Unavailable
from muster.transfer import group as transport
from muster.transfer import manifest as weights
from muster.transfer import stored, wire
from muster.transfer.active import ActiveRequests, active_to_pb
from muster.transfer.quorum import Quorum
from muster.transfer.snapshot import Snapshot
from muster.types import Value
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_log = telemetry.logger("muster.transfer")
# A replica answers between two steps of its engine; asking it takes time of its transfer, too.
_POLL_SENDING_S, _POLL_SENT_S, _POLL_S = 0.25, 0.002, 0.05
_Opened = tuple[transport.Meeting, transport.GroupSpec]
_GRACE_S = 2.0  # after the deadline, for telling those that failed
STORED = "stored"

Passing = Callable[[str], Awaitable[None]]
"""Called with `prepare.before`, `prepare.after`, `commit.before` and `commit.after` around these
calls to each replica: a place for failpoints."""


async def _pass(where: str) -> None:
    del where


class TransferSettings(Value, frozen=True):
    """How to publish. `host` is an address of the trainer that replicas can reach."""

    backend: str = "gloo"  # gloo, nccl; or stored: through a folder that the replicas can read
    host: str = "127.0.0.1"
    folder: str = ""  # of stored versions; each run has one of its own in it
    stored_kept: int = 2  # newest versions of the run that stay there
    active: ActiveRequests = ActiveRequests.RECOMPUTE  # what becomes of running requests
    quorum: float = 0.0  # share of the replicas that must hold a version before one serves it
    bytes_per_s: float = 0.0  # most that sending takes from the line; 0: no bound
    timeout_s: float = 120.0  # of the whole publication
    call_timeout_s: float = 20.0  # of a call that answers at once


class ReplicaPublication(Value, frozen=True):
    """How one replica took the version. `error` is empty when it serves it."""

    replica: str
    address: str
    error: str = ""
    latency_s: float = 0.0  # weights ready until it said that it serves them: canary passed
    pause_s: float = 0.0
    token_gap_s: float = 0.0
    receive_s: float = 0.0
    apply_s: float = 0.0
    requests_recomputed: int = 0
    tokens_lost: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_kept: int = 0

    @property
    def serving(self) -> bool:
        """True when this replica serves the version."""
        return not self.error


async def publish(
    snapshot: Snapshot,
    *,
    run: str,
    trainer_epoch: int,
    replicas: Sequence[tuple[str, str]],
    settings: TransferSettings | None = None,
    serving: int = 0,
    left_alone: int = 0,
    passing: Passing = _pass,
) -> list[ReplicaPublication]:
    """Bring a version (exactly the tensors of the checkpoint) to all replicas, side by side.

    replicas: (id, gRPC address); one report each, in that order. A replica that fails is fenced
    when another one took the version, or serves it already (`serving`: how many others do, which
    hold it for the quorum too; `left_alone`: how many others do not hold it and are not tried now);
    else all go on with what they serve. Raises Fenced if a newer trainer has been seen by a
    replica; everything else is in the reports.
    """
    settings = settings or TransferSettings()
    began = monotonic()
    if not replicas:
        return []
    stream, made = snapshot.stream, snapshot.manifest
    if settings.backend == "nccl":
        stream = await asyncio.to_thread(stream.cuda)
    everyone = len(replicas) + serving + left_alone
    quorum = Quorum(everyone, settings.quorum, holding=serving, failed=left_alone)
    job = _Job(run, trainer_epoch, made, stream, settings, began, passing, quorum)
    # A group per replica where the transport is point to point anyway: failures stay apart.
    together = [list(replicas)] if settings.backend == "nccl" else [[r] for r in replicas]
    reports: dict[str, ReplicaPublication] = {}
    with telemetry.span("publish", version=made.version, replicas=len(replicas)):
        if settings.backend == STORED and (error := await job.store(snapshot)):
            together = []
            for name, address in replicas:
                reports[name] = ReplicaPublication(name, address, error=str(error))
        async with asyncio.TaskGroup() as tasks:
            for members in together:
                tasks.create_task(job.transfer(members, reports), name=f"publish-{members[0][0]}")
        # Only now is it known whether anybody serves the version.
        fence = serving > 0 or any(report.serving for report in reports.values())
        await _all([job.settle(item, fence) for item in reports.values() if not item.serving])
    if job.fenced is not None:
        raise job.fenced
    return [reports[name] for name, _ in replicas]


class _Job:
    """One publication in hand."""

    def __init__(
        self,
        run: str,
        epoch: int,
        manifest: weights.Manifest,
        stream: Any,
        settings: TransferSettings,
        began: float,
        passing: Passing,
        quorum: Quorum,
    ):
        self._run, self._epoch, self._manifest = run, epoch, manifest
        self._stream, self._settings, self._began = stream, settings, began
        self.passing = passing
        self.fenced: Fenced | None = None
        self.quorum = quorum
        self._folder = ""

    async def transfer(
        self, members: list[tuple[str, str]], reports: dict[str, ReplicaPublication]
    ) -> None:
        """One group: all members or, after some failed to prepare, the others in a new group."""
        while members:
            async with AsyncExitStack() as channels:
                enter = channels.enter_async_context
                links = [_Link(self, n, at, await enter(rpc.channel(at))) for n, at in members]
                left: list[tuple[str, str]] = []
                if self._folder:
                    await self._read_and_commit(links)
                else:
                    ready = await self._prepare(links)
                    if ready and all(link.error is None for link in links):
                        await self._send_and_commit(links, *ready)
                    else:
                        left = [(k.name, k.address) for k in links if k.error is None]
                        links = [link for link in links if link.error is not None]
                for link in links:
                    reports[link.name] = link.report()
                members = left

    async def store(self, snapshot: Snapshot) -> Unavailable | None:
        """Put the version where the replicas read it; those that nobody reads any more go. What
        went wrong, if anything did."""
        # Another run's versions have other numbers, and may be read right now.
        root, keep = Path(self._settings.folder) / self._run, self._settings.stored_kept
        try:
            self._folder = str(await stored.put(snapshot, root, keep=keep, timeout_s=self.left()))
        except Unavailable as error:
            return error
        return None

    async def _read_and_commit(self, links: list[_Link]) -> None:
        source = wire.stored_to_pb(stored.StoredSpec(self._folder, self.left()))
        await _all([link.prepare(stored=source) for link in links])
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sent.set_result(None)
        await _all([link.stage_and_commit(sent) for link in links if link.error is None])

    async def _prepare(self, links: list[_Link]) -> _Opened | None:
        size, left = len(links) + 1, self.left()
        try:
            meeting = transport.Meeting(self._settings.host, size, timeout_s=left)
        except MusterError as error:
            for link in links:
                link._failed(error)
            return None
        spec = transport.GroupSpec(
            backend=self._settings.backend,
            host=meeting.host,
            port=meeting.port,
            rank=0,
            world_size=size,
            generation=f"{self._run}/{self._manifest.version}/{uuid.uuid4().hex}",
            timeout_s=left,
            bucket_bytes=transport.PACED_BUCKET_BYTES
            if self._settings.bytes_per_s
            else transport.BUCKET_BYTES,
        )
        groups = [wire.group_to_pb(replace(spec, rank=at + 1)) for at in range(len(links))]
        pairs = zip(links, groups, strict=True)
        await _all([link.prepare(group=group) for link, group in pairs])
        return meeting, spec

    async def _send_and_commit(
        self, links: list[_Link], meeting: transport.Meeting, spec: transport.GroupSpec
    ) -> None:
        sending = in_daemon(lambda: self._send(meeting, spec), f"send-{self._manifest.version}")
        await _all([link.stage_and_commit(sending) for link in links])

    def _send(self, meeting: transport.Meeting, spec: transport.GroupSpec) -> None:
        group = transport.join(spec, store=meeting.store)
        began, most = monotonic(), self._settings.bytes_per_s

        def pace(sent: int) -> None:
            time.sleep(min(self.left(), transport.ahead_s(sent, monotonic() - began, most)))

        try:
            group.broadcast(self._stream, pace if most else None, ahead=0 if most else 1)
        finally:
            group.close()

    async def settle(self, failed: ReplicaPublication, fence: bool) -> None:
        """Tell a replica that failed to drop what it has; it may be gone."""
        request = pb.AbortWeightUpdateRequest(
            run=self._run, trainer_epoch=self._epoch, version=self._manifest.version, fence=fence
        )
        async with rpc.channel(failed.address) as channel:
            stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
            try:
                with rpc.calling(f"abort on {failed.replica}"):
                    limit = min(self._settings.call_timeout_s, max(_GRACE_S, self.left()))
                    await stub.AbortWeightUpdate(request, timeout=limit)
            except MusterError as error:
                _log.warning("abort (fence: %s) on %s: %s", fence, failed.replica, error)

    def left(self) -> float:
        """Seconds left for this publication, never quite 0."""
        return max(0.1, self._settings.timeout_s - (monotonic() - self._began))


class _Link:
    """One replica in one publication."""

    def __init__(self, job: _Job, name: str, address: str, channel: Any):
        self._job, self.name, self.address = job, name, address
        self._stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
        self.error: MusterError | None = None
        self._answer: pb.CommitWeightUpdateResponse | None = None
        self._latency_s = 0.0

    async def prepare(
        self, *, group: pb.TransferGroup | None = None, stored: pb.StoredWeights | None = None
    ) -> None:
        """Ask it to receive; the error, if any, is kept."""
        job = self._job
        request = pb.PrepareWeightUpdateRequest(
            run=job._run,
            trainer_epoch=job._epoch,
            manifest=wire.manifest_to_pb(job._manifest),
            group=group,
            stored=stored,
            bytes_per_s=job._settings.bytes_per_s,
        )
        try:
            await job.passing("prepare.before")
            with rpc.calling(f"prepare on {self.name}"):
                await self._stub.PrepareWeightUpdate(request, timeout=self._call_s())
            await job.passing("prepare.after")
        except MusterError as error:
            self._failed(error)

    async def stage_and_commit(self, sending: asyncio.Future[None]) -> None:
        """Wait until it has verified everything, then let it apply."""
        try:
            async with asyncio.timeout(self._job.left()):
                await self._staged(sending)
                self._job.quorum.holds(self.name)
                await self._job.quorum.wait()
                await self._commit()
        except TimeoutError:
            limit = self._job._settings.timeout_s
            self._failed(
                Unavailable(
                    f"{self.name} did not take version {self._job._manifest.version} "
                    f"within {limit} s",
                    way_out="see its log; it is left out until a publication reaches it",
                )
            )
        except MusterError as error:
            self._failed(error)

    async def _staged(self, sending: asyncio.Future[None]) -> None:
        version, pause = self._job._manifest.version, _POLL_SENT_S
        while True:
            status = await self._status()
            idle = status.update_phase == pb.UPDATE_PHASE_IDLE  # of no version, which reads as 0
            if status.update_version == version and not idle:
                if status.update_phase == pb.UPDATE_PHASE_STAGED:
                    return
                if status.update_phase == pb.UPDATE_PHASE_FAILED:
                    raise Unavailable(f"{self.name} refused it: {status.update_error}")
            elif sending.done():
                raise Unavailable(f"{self.name} is no longer receiving version {version}")
            if sending.done() and sending.exception() is not None:
                raise Unavailable(f"sending to {self.name}: {sending.exception()}")
            if sending.done():  # little is left: look again soon, then ever more seldom
                await asyncio.sleep(pause)
                pause = min(2 * pause, _POLL_S)
            else:
                await asyncio.wait([sending], timeout=_POLL_SENDING_S)

    async def _commit(self) -> None:
        job = self._job
        version = job._manifest.version
        request = pb.CommitWeightUpdateRequest(
            run=job._run,
            trainer_epoch=job._epoch,
            version=version,
            active=active_to_pb(job._settings.active),
        )
        await job.passing("commit.before")
        try:
            with rpc.calling(f"commit on {self.name}"):
                self._answer = await self._stub.CommitWeightUpdate(request, timeout=job.left())
            await job.passing("commit.after")
        except Unavailable:
            # The answer is lost, not known to be no: ask.
            status = await self._status()
            if status.version != version or status.state != pb.REPLICA_STATE_SERVING:
                raise
            self._answer = pb.CommitWeightUpdateResponse(version=version)
        self._latency_s = monotonic() - job._began

    def report(self) -> ReplicaPublication:
        """What became of it."""
        if self._answer is None:
            why = str(self.error) or "no answer"
            return ReplicaPublication(self.name, self.address, error=why)
        answer = self._answer
        return ReplicaPublication(
            self.name,
            self.address,
            latency_s=self._latency_s,
            pause_s=answer.pause_s,
            token_gap_s=answer.token_gap_s,
            receive_s=answer.receive_s,
            apply_s=answer.apply_s,
            requests_recomputed=answer.requests_recomputed,
            tokens_lost=answer.tokens_lost,
            requests_finished=answer.requests_finished,
            requests_aborted=answer.requests_aborted,
            requests_kept=answer.requests_kept,
        )

    async def _status(self) -> pb.GetReplicaStatusResponse:
        with rpc.calling(f"status of {self.name}"):
            request = pb.GetReplicaStatusRequest()
            return await self._stub.GetReplicaStatus(request, timeout=self._call_s())

    def _failed(self, error: MusterError) -> None:
        _log.warning("publication to %s failed: %s", self.name, error)
        self.error = error
        self._job.quorum.fails(self.name)
        if isinstance(error, Fenced):
            self._job.fenced = error

    def _call_s(self) -> float:
        return min(self._job._settings.call_timeout_s, self._job.left())


async def _all(work: Sequence[Any]) -> None:
    """Run coroutines side by side; each keeps its own error."""
    async with asyncio.TaskGroup() as tasks:
        for one in work:
            tasks.create_task(one)
