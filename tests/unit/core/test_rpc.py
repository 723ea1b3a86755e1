"""gRPC between real ends: errors keep their meaning, calls their bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from muster import errors, rpc, telemetry
from muster.v1 import router_pb2, router_pb2_grpc

NAME = "muster.v1.RouterService"


class Router(router_pb2_grpc.RouterServiceServicer):
    """Does what the test says."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.closed = asyncio.Event()
        self.metadata: dict[str, str] = {}
        self.endless = False
        self.detail = b""

    async def GetJob(self, request: Any, context: Any) -> Any:
        self.metadata = dict(context.invocation_metadata())
        if self.error:
            raise self.error
        if self.detail:
            await context.abort(grpc.StatusCode.ABORTED, "p", (("muster-error-bin", self.detail),))
        return router_pb2.GetJobResponse(progress=router_pb2.JobProgress(job=request.job))

    async def WatchJob(self, request: Any, context: Any) -> Any:
        try:
            yield router_pb2.WatchJobResponse()
            if self.error:
                raise self.error
            if self.endless:
                await asyncio.Event().wait()
        finally:
            self.closed.set()


class Ends:
    """A running server and a stub that calls it."""

    def __init__(self, router: Router, server: rpc.RpcServer, channel: grpc.aio.Channel):
        self.router, self.server, self.channel = router, server, channel
        self.stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(
            channel
        )

    async def get(self, job: str = "j", within_s: float | None = 5) -> Any:
        with rpc.calling("get job"):
            return await self.stub.GetJob(router_pb2.GetJobRequest(job=job), timeout=within_s)

    def watch(self, timeout: float | None = 5) -> Any:
        return self.stub.WatchJob(router_pb2.WatchJobRequest(job="j"), timeout=timeout)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    router = Router()
    add = router_pb2_grpc.add_RouterServiceServicer_to_server
    async with (
        rpc.serve("127.0.0.1:0", [(add, router)], names=[NAME], grace_s=0) as server,
        rpc.channel(server.address) as channel,
    ):
        yield Ends(router, server, channel)


async def test_a_call_is_answered_and_the_address_is_the_real_one(ends: Ends) -> None:
    assert (await ends.get("mine")).progress.job == "mine"
    assert not ends.server.address.endswith(":0")


KINDS = [
    k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.MusterError)
]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_caller_catches_what_the_servicer_raised(
    ends: Ends, kind: type[errors.MusterError]
) -> None:
    ends.router.error = kind("too small → ü", field="group_size", value=1, way_out="use 2 or more")
    with pytest.raises(errors.MusterError) as caught:
        await ends.get()
    found = caught.value
    assert type(found) is kind
    assert (found.problem, found.field, found.value, found.way_out) == (
        "too small → ü",
        "group_size",
        "1",
        "use 2 or more",
    )


@pytest.mark.parametrize("text", ["x" * 100_000, "→" * 50_000, "😀" * 20_000, '"\\' * 30_000])
async def test_an_error_of_any_length_arrives(ends: Ends, text: str) -> None:
    ends.router.error = errors.Refused(text, field=text, value=text, way_out=text)
    with pytest.raises(errors.Refused) as caught:
        await ends.get()
    assert caught.value.problem[:20] == text[:20]
    assert caught.value.way_out[:20] == text[:20]


async def test_the_status_alone_says_what_to_do_to_other_clients(ends: Ends) -> None:
    ends.router.error = errors.NotFound("no such job", field="job", value="j", way_out="list them")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ends.stub.GetJob(router_pb2.GetJobRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "job = 'j': no such job → list them"


async def test_a_bug_answers_internal_and_tells_nothing_of_itself(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    ends.router.error = LookupError("secret of the house")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ends.stub.GetJob(router_pb2.GetJobRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    assert "secret of the house" in caplog.text


async def test_a_bug_in_a_stream_answers_internal_too(ends: Ends) -> None:
    ends.router.error = LookupError("secret of the house")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in ends.watch():
            pass
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")


async def test_a_call_without_a_deadline_is_refused(ends: Ends) -> None:
    with pytest.raises(errors.InvalidInput) as caught:
        await ends.get(within_s=None)
    assert (caught.value.field, caught.value.value) == ("deadline", "none")


async def test_a_stream_without_a_deadline_is_refused(ends: Ends) -> None:
    with pytest.raises(errors.InvalidInput, match="no deadline"), rpc.calling("watch"):
        async for _ in ends.watch(timeout=None):
            pass


async def test_a_stream_may_fail_after_it_began(ends: Ends) -> None:
    ends.router.error = errors.Exhausted("too many", field="watchers")
    call = ends.watch()
    await call.read()
    with pytest.raises(errors.Exhausted, match="too many"), rpc.calling("watch"):
        await call.read()
    assert ends.router.closed.is_set()


async def test_a_stream_is_closed_on_the_server_when_the_caller_leaves(ends: Ends) -> None:
    ends.router.endless = True
    call = ends.watch()
    await call.read()
    call.cancel()
    async with asyncio.timeout(5):
        await ends.router.closed.wait()


async def test_a_stream_is_closed_on_the_server_when_its_deadline_passes(ends: Ends) -> None:
    ends.router.endless = True
    with pytest.raises(errors.Unavailable, match="DEADLINE_EXCEEDED"), rpc.calling("watch"):
        async for _ in ends.watch(timeout=0.05):
            pass
    async with asyncio.timeout(5):
        await ends.router.closed.wait()


async def test_a_method_that_is_not_there_is_no_retry(ends: Ends) -> None:
    with pytest.raises(errors.MusterError, match="UNIMPLEMENTED") as caught, rpc.calling("cancel"):
        await ends.stub.CancelJob(router_pb2.CancelJobRequest(), timeout=5)
    assert not isinstance(caught.value, errors.Unavailable)


async def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    async with rpc.channel(f"unix:{tmp_path}/nobody") as channel:
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(errors.Unavailable, match="get job"), rpc.calling("get job"):
            await stub.GetJob(router_pb2.GetJobRequest(), timeout=5)


async def test_a_port_that_is_taken_is_named_with_its_field(ends: Ends) -> None:
    with pytest.raises(errors.InvalidInput, match="port is taken") as caught:
        async with rpc.serve(ends.server.address, [], field="router.listen"):
            pass
    assert (caught.value.field, caught.value.value) == ("router.listen", ends.server.address)
    assert "port 0" in caught.value.way_out


async def test_a_unix_socket_serves(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    add = router_pb2_grpc.add_RouterServiceServicer_to_server
    async with rpc.serve(address, [(add, Router())], grace_s=0) as server:
        assert server.address == address
        async with rpc.channel(address) as channel:
            assert (await Ends(Router(), server, channel).get("x")).progress.job == "x"


async def health(ends: Ends, name: str) -> Any:
    stub = health_pb2_grpc.HealthStub(ends.channel)
    request = health_pb2.HealthCheckRequest(service=name)
    return (await stub.Check(request, timeout=5)).status


async def test_health_follows_the_service(ends: Ends) -> None:
    serving, not_serving = 1, 2
    assert await health(ends, "") == await health(ends, NAME) == serving
    await ends.server.set_serving(NAME, False)
    assert (await health(ends, NAME), await health(ends, "")) == (not_serving, serving)


async def test_health_needs_no_deadline(ends: Ends) -> None:
    stub = health_pb2_grpc.HealthStub(ends.channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1


class Locked:
    def check(self, method: str, metadata: dict[str, str]) -> None:
        if metadata.get("key") != "open":
            raise errors.Refused("not for you", field="key", way_out="bring one")


async def test_the_seat_for_authentication_is_asked_for_every_call() -> None:
    add = router_pb2_grpc.add_RouterServiceServicer_to_server
    async with (
        rpc.serve("127.0.0.1:0", [(add, Router())], auth=Locked(), grace_s=0) as server,
        rpc.channel(server.address) as channel,
    ):
        ends = Ends(Router(), server, channel)
        with pytest.raises(errors.Refused, match="not for you"):
            await ends.get()
        with pytest.raises(errors.Refused, match="not for you"), rpc.calling("watch"):
            async for _ in ends.watch():
                pass
        request = router_pb2.GetJobRequest(job="j")
        await ends.stub.GetJob(request, timeout=5, metadata=(("key", "open"),))


async def test_the_trace_goes_on_across_a_call(ends: Ends) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    with TracerProvider().get_tracer("test").start_as_current_span("caller"):
        caller = telemetry.traceparent()
        await ends.get()
    assert ends.router.metadata["traceparent"] == caller


async def test_a_status_names_no_class_but_an_error(ends: Ends) -> None:
    """A peer may be of another version, or worse: only MusterErrors are ever made of its words."""

    ends.router.detail = b'{"kind":"ClassVar","problem":"p","field":"f","value":"v","way_out":"w"}'
    with pytest.raises(errors.Fenced, match="p"):
        await ends.get()
