"""SandboxService: protobuf at the door, domain behind it. No decisions here."""

from __future__ import annotations

import grpc

from muster import codec
from muster.types import Limits
from muster.v1 import sandbox_pb2 as pb
from muster.v1 import sandbox_pb2_grpc
from services.sandbox.adapters.callers import Capacity
from services.sandbox.driver import SandboxHost
from services.sandbox.places import BoxState

SERVICE_NAME = "muster.v1.SandboxService"


class SandboxServicer(sandbox_pb2_grpc.SandboxServiceServicer):
    """The calls; MusterError becomes a status in muster/rpc.py."""

    def __init__(self, host: SandboxHost, backend: str = ""):
        """backend: its name, for GetHostStatus."""
        self._host, self._backend = host, backend

    async def ClaimHost(
        self,
        request: pb.ClaimHostRequest,
        context: grpc.aio.ServicerContext[pb.ClaimHostRequest, pb.ClaimHostResponse],
    ) -> pb.ClaimHostResponse:
        living = await self._host.claim(request.run, request.owner_epoch)
        boxes = [
            pb.LivingBox(episode=codec.key_to_pb(b.key), box=b.box, newest_turn=b.newest_turn)
            for b in living
        ]
        return pb.ClaimHostResponse(boxes=boxes, fenced_calls=self._host.fenced_calls)

    async def AcquireBox(
        self,
        request: pb.AcquireBoxRequest,
        context: grpc.aio.ServicerContext[pb.AcquireBoxRequest, pb.AcquireBoxResponse],
    ) -> pb.AcquireBoxResponse:
        asked = request.limits
        got = await self._host.acquire(
            codec.key_from_pb(request.episode),
            request.task.name,
            request.task.digest,
            request.task.archive,
            Limits(
                asked.memory_bytes,
                asked.pids,
                asked.disk_bytes,
                asked.disk_inodes,
                asked.output_bytes,
                asked.cpus,
            ),
            context.time_remaining() or 0.0,
            fresh=request.fresh,
            waited_s=request.waited_s,
        )
        return pb.AcquireBoxResponse(
            box=got.box,
            host=self._host.host,
            start_s=got.start_s,
            workdir=got.workdir,
            source=pb.BoxSource.Value(f"BOX_SOURCE_{got.made}"),
            waited_s=got.waited_s,
        )

    async def Exec(
        self,
        request: pb.ExecRequest,
        context: grpc.aio.ServicerContext[pb.ExecRequest, pb.ExecResponse],
    ) -> pb.ExecResponse:
        record, repeated = await self._host.execute(
            codec.key_from_pb(request.episode),
            request.box,
            request.turn,
            request.command,
            request.timeout_s,
            after=request.after_turn if request.HasField("after_turn") else None,
        )
        found = record.evidence
        return pb.ExecResponse(
            exit_code=found.exit_code,
            signal=found.signal,
            limit=codec.limit_to_pb(record.limit),
            wall_s=found.wall_s,
            cpu_s=found.cpu_s,
            output_head=found.head,
            output_tail=found.tail,
            output_bytes_total=found.total,
            box_broken=bool(found.broken),
            repeated=repeated,
            cpu_stall_s=found.cpu_stall_s,
            memory_stall_s=found.memory_stall_s,
            io_stall_s=found.io_stall_s,
        )

    async def Verify(
        self,
        request: pb.VerifyRequest,
        context: grpc.aio.ServicerContext[pb.VerifyRequest, pb.VerifyResponse],
    ) -> pb.VerifyResponse:
        done = await self._host.verify(
            codec.key_from_pb(request.episode),
            request.box,
            after=request.after_turn if request.HasField("after_turn") else None,
        )
        return pb.VerifyResponse(
            status=codec.verdict_to_pb(done.verdict.status),
            reward=done.verdict.reward,
            detail=done.verdict.detail,
            wall_s=done.evidence.wall_s,
            exit_code=done.evidence.exit_code,
            output_tail=done.evidence.head + done.evidence.tail,
            cpu_s=done.evidence.cpu_s,
            cpu_stall_s=done.evidence.cpu_stall_s,
        )

    async def ReleaseBox(
        self,
        request: pb.ReleaseBoxRequest,
        context: grpc.aio.ServicerContext[pb.ReleaseBoxRequest, pb.ReleaseBoxResponse],
    ) -> pb.ReleaseBoxResponse:
        existed = await self._host.release(codec.key_from_pb(request.episode), request.box)
        return pb.ReleaseBoxResponse(existed=existed)

    async def ForkBox(
        self,
        request: pb.ForkBoxRequest,
        context: grpc.aio.ServicerContext[pb.ForkBoxRequest, pb.ForkBoxResponse],
    ) -> pb.ForkBoxResponse:
        got = await self._host.fork(
            codec.key_from_pb(request.episode),
            request.box,
            codec.key_from_pb(request.into),
            context.time_remaining() or 0.0,
            after=request.after_turn if request.HasField("after_turn") else None,
        )
        return pb.ForkBoxResponse(box=got.box, start_s=got.start_s)

    async def CopyIn(
        self,
        request: pb.CopyInRequest,
        context: grpc.aio.ServicerContext[pb.CopyInRequest, pb.CopyInResponse],
    ) -> pb.CopyInResponse:
        files, size = await self._host.copy_in(
            codec.key_from_pb(request.episode), request.box, request.folder, request.archive
        )
        return pb.CopyInResponse(files=files, bytes=size)

    async def CopyOut(
        self,
        request: pb.CopyOutRequest,
        context: grpc.aio.ServicerContext[pb.CopyOutRequest, pb.CopyOutResponse],
    ) -> pb.CopyOutResponse:
        key = codec.key_from_pb(request.episode)
        return pb.CopyOutResponse(archive=await self._host.copy_out(key, request.box, request.path))

    async def GetHostStatus(
        self,
        request: pb.GetHostStatusRequest,
        context: grpc.aio.ServicerContext[pb.GetHostStatusRequest, pb.GetHostStatusResponse],
    ) -> pb.GetHostStatusResponse:
        status = self._host.status()
        states, counts, load = status.states, status.counts, status.load
        return pb.GetHostStatusResponse(
            host=self._host.host,
            backend=self._backend,
            capacity=_capacity(status.capacity),
            boxes=pb.HostBoxes(
                in_use=states.get(BoxState.READY, 0) + states.get(BoxState.HANDING, 0),
                starting=states.get(BoxState.STARTING, 0) + states.get(BoxState.BUILDING, 0),
                warm=states.get(BoxState.WARM, 0),
                ending=states.get(BoxState.ENDING, 0),
                waiting=status.waiting,
                snapshots=status.snapshots,
                snapshot_bytes=status.snapshot_bytes,
            ),
            counts=pb.HostCounts(
                acquired=counts.acquired,
                steps=counts.steps,
                verified=counts.verified,
                released=counts.released,
                adopted=counts.adopted,
                warm_dead=counts.warm_dead,
                failures={str(cause): count for cause, count in counts.failures.items()},
                seconds={
                    kind: pb.Quantiles(count=q.count, p50=q.p50, p90=q.p90, p99=q.p99)
                    for kind, q in counts.seconds().items()
                },
            ),
            load=load.load,
            processors=load.processors,
            memory_total_bytes=load.memory_total,
            memory_available_bytes=load.memory_available,
        )

    async def SetCapacity(
        self,
        request: pb.SetCapacityRequest,
        context: grpc.aio.ServicerContext[pb.SetCapacityRequest, pb.SetCapacityResponse],
    ) -> pb.SetCapacityResponse:
        capacity = self._host.set_capacity(
            request.boxes_max if request.HasField("boxes_max") else None,
            request.warm_max if request.HasField("warm_max") else None,
        )
        return pb.SetCapacityResponse(capacity=_capacity(capacity))


def _capacity(capacity: Capacity) -> pb.HostCapacity:
    return pb.HostCapacity(
        boxes_max=capacity.boxes_max,
        starting_max=capacity.starting_max,
        warm_max=capacity.warm_max,
    )
