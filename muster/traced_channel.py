"""A gRPC channel whose calls carry the caller's trace context.

Owns: `TracedChannel`. Promise: a call is the channel's own call with one more header, and nothing
else is made for it. gRPC's interceptors make a task, a call around the call and a generator for
each, in cycles that only Python's cyclic collector ends: a router grew by 7 KiB per episode
(docs/results/router.md). Does not cover: bounds and errors (rpc.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from muster import telemetry

_HEADER = "traceparent"


class TracedChannel(grpc.aio.Channel):
    """`inner` with trace context. Closing it closes `inner`."""

    def __init__(self, inner: grpc.aio.Channel):
        self._inner = inner

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return _traced(self._inner.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _traced(self._inner.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _traced(self._inner.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _traced(self._inner.stream_stream(*args, **options))

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> TracedChannel:
        return self

    async def __aexit__(self, *error: object) -> bool | None:
        await self.close()
        return None


def _traced(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a stub: the span that is current when it is called is the server's parent."""

    def call(request: Any = None, *, metadata: Any = None, **options: Any) -> Any:
        parent = telemetry.traceparent()
        if parent:
            metadata = (*(metadata or ()), (_HEADER, parent))
        return method(request, metadata=metadata, **options)

    return call
