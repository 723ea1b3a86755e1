"""A call carries the span that it was made in, whatever its kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider

from muster import rpc, telemetry


class Seen(grpc.GenericRpcHandler):
    """Answers every method; remembers the headers of the newest call."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        self.headers = dict(details.invocation_metadata)
        if details.method.endswith("Stream"):
            return grpc.unary_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(self._unary)

    async def _unary(self, request: bytes, context: Any) -> bytes:
        return request

    async def _stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request


async def call(channel: grpc.aio.Channel, kind: str, **options: Any) -> bytes:
    if kind == "Stream":
        return b"".join([part async for part in channel.unary_stream("/x/Stream")(b"a", **options)])
    answer: bytes = await channel.unary_unary("/x/Unary")(b"a", **options)
    return answer


@pytest.mark.parametrize("kind", ["Unary", "Stream"])
async def test_the_span_of_a_call_is_the_servers_parent_beside_other_headers(kind: str) -> None:
    seen, server = Seen(), grpc.aio.server()
    server.add_generic_rpc_handlers((seen,))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with rpc.channel(address) as channel:
            assert await call(channel, kind, timeout=5) == b"a"
            assert "traceparent" not in seen.headers
            with TracerProvider().get_tracer("test").start_as_current_span("caller"):
                caller = telemetry.traceparent()
                await call(channel, kind, timeout=5, metadata=(("key", "open"),))
        assert (seen.headers["traceparent"], seen.headers["key"]) == (caller, "open")
    finally:
        await server.stop(0)
