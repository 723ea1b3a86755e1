"""A router that answers from a script, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from muster import rpc
from muster.errors import Fenced, NotFound, Unavailable
from muster.v1 import router_pb2 as pb
from muster.v1.router_pb2_grpc import RouterServiceServicer, add_RouterServiceServicer_to_server


def progress(trained: int, state: pb.JobState.ValueType = pb.JOB_STATE_RUNNING) -> pb.JobProgress:
    return pb.JobProgress(
        job="job-a",
        state=state,
        groups_total=2,
        groups_trained=trained,
        outcomes={"model_success": 1, "infra_failure": 2},
        policy_version=trained,
    )


class RouterDouble(RouterServiceServicer):
    """`watches`: what each WatchJob in turn sends; a stream that ends early breaks off."""

    def __init__(
        self,
        watches: Sequence[Sequence[pb.JobProgress]] = (),
        refusals: int = 0,
        fenced: bool = False,
    ):
        self.fenced = fenced
        self.hold = asyncio.Event()  # while it is not set, watches that have said all stay open
        self.hold.set()
        self.submitted: list[pb.SubmitTaskSetRequest] = []
        self.watches, self.refusals = list(watches), refusals

    def serving(self, listen: str = "127.0.0.1:0") -> AbstractAsyncContextManager[rpc.RpcServer]:
        return rpc.serve(listen, [(add_RouterServiceServicer_to_server, self)], grace_s=0)

    async def SubmitTaskSet(self, request: Any, context: Any) -> Any:
        self.submitted.append(request)
        if self.fenced:
            raise Fenced("a newer router leads")
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("starting")
        return pb.SubmitTaskSetResponse(job=request.job, run="main")

    async def GetJob(self, request: Any, context: Any) -> Any:
        raise NotFound("no such job", field="job", value=request.job, way_out="see the list")

    async def Explain(self, request: Any, context: Any) -> Any:
        raise NotFound("nothing of that name")

    async def CancelJob(self, request: Any, context: Any) -> Any:
        return pb.CancelJobResponse(progress=progress(0, pb.JOB_STATE_CANCELLED))

    async def WatchJob(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for message in self.watches.pop(0):
            yield pb.WatchJobResponse(progress=message)
        await self.hold.wait()
        if not self.watches:
            return
        raise Unavailable("restarting")
