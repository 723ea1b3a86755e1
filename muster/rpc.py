"""gRPC the way every service of Muster speaks it.

Owns: servers and channels with their bounds, the mapping of MusterError to a status and back,
deadlines, trace context, the seat for authentication, health. Promise: a servicer raises
MusterError and the caller catches the same MusterError with its field, value and way out; a call
without a deadline is refused; a bug answers INTERNAL without leaking a traceback.
Does not cover: which replica is called (the router's policy).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from muster import errors, telemetry
from muster.traced_channel import TracedChannel

MESSAGE_BYTES_MAX = 64 << 20
_PORT_MAX = 65_535
_DETAIL = "muster-error-bin"
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Pings must not come faster than the server allows, or it answers GOAWAY.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ("grpc.so_reuseport", 0),
    # A service that comes back at its old address is found within seconds, not minutes.
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
_log = telemetry.logger("muster.rpc")


class Authenticator(Protocol):
    """The seat for authentication: raise MusterError to refuse a call."""

    def check(self, method: str, metadata: dict[str, str]) -> None: ...


class OpenDoor:
    """No authentication: for loopback and private networks."""

    def check(self, method: str, metadata: dict[str, str]) -> None:
        del method, metadata


class RpcServer:
    """A started server; `address` is where it really listens."""

    def __init__(self, address: str, checks: health.aio.HealthServicer):
        self.address, self._health = address, checks

    async def set_serving(self, name: str, serving: bool) -> None:
        """Health of one service name; "" stands for the whole process."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)


def check_address(address: str, *, field: str) -> None:
    """Raise InvalidInput when it is neither HOST:PORT, [IPV6]:PORT nor unix:PATH."""
    found = re.fullmatch(r"unix:.+|(?:[^\s:\[\]]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", address)
    if not found or int(found[1] or 0) > _PORT_MAX:
        raise errors.InvalidInput(
            "not an address",
            field=field,
            value=address,
            way_out="write HOST:PORT (port 0: the system chooses), or unix:PATH",
        )


class Listener:
    """A bound address that serves nothing yet: taken before an owner fences its predecessor.

    Raises InvalidInput naming `field` when `listen` cannot be bound.
    """

    def __init__(self, listen: str, *, auth: Authenticator | None = None, field: str = "listen"):
        check_address(listen, field=field)
        self._server = grpc.aio.server(interceptors=[_Guard(auth or OpenDoor())], options=_OPTIONS)
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise errors.InvalidInput(
                "cannot listen there: the port is taken or the address is not of this machine",
                field=field,
                value=listen,
                way_out="stop what uses that port, or choose another (port 0: the system chooses)",
            ) from error
        host = listen.rpartition(":")[0]
        self.address = listen if listen.startswith("unix:") else f"{host}:{port}"

    @asynccontextmanager
    async def serving(
        self,
        servicers: Sequence[tuple[Callable[[Any, Any], None], Any]],
        *,
        names: Sequence[str] = (),
        grace_s: float = 1.0,
    ) -> AsyncIterator[RpcServer]:
        """Serve until the block ends; then NOT_SERVING, drain `grace_s`, stop."""
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._server)
        for add, servicer in servicers:
            add(servicer, self._server)
        await self._server.start()
        running = RpcServer(self.address, checks)
        for name in ("", *names):
            await running.set_serving(name, True)
        try:
            yield running
        finally:
            await checks.enter_graceful_shutdown()
            await self._server.stop(grace_s)


def listener(listen: str, *, field: str, fallback: bool) -> Listener:
    """A bound address; with `fallback`, any port of the same host when that one is taken.

    For a standby: the former owner may still hold its port (a stopped process does).
    """
    try:
        return Listener(listen, field=field)
    except errors.InvalidInput:
        host, _, _ = listen.rpartition(":")
        if not fallback or not host or listen.startswith("unix:"):
            raise
        _log.warning("%s is taken: another port is chosen and announced", listen)
        return Listener(f"{host}:0", field=field)


@asynccontextmanager
async def serve(
    listen: str,
    servicers: Sequence[tuple[Callable[[Any, Any], None], Any]],
    *,
    names: Sequence[str] = (),
    auth: Authenticator | None = None,
    grace_s: float = 1.0,
    field: str = "listen",
) -> AsyncIterator[RpcServer]:
    """Bind and serve in one go."""
    listener = Listener(listen, auth=auth, field=field)
    async with listener.serving(servicers, names=names, grace_s=grace_s) as server:
        yield server


@asynccontextmanager
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel with Muster's bounds and trace context."""
    made = open_channel(address)
    try:
        yield made
    finally:
        await made.close()


def open_channel(address: str) -> grpc.aio.Channel:
    """Like channel(), for owners that close it themselves."""
    return TracedChannel(grpc.aio.insecure_channel(address, options=_OPTIONS))


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Turn a failed call inside the block into the MusterError that the server raised.

    UNAVAILABLE, DEADLINE_EXCEEDED and a cut connection become Unavailable: the outcome of the
    call is then unknown to the caller.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error, what) from error
    except grpc.aio.UsageError as error:  # started on a channel that was just closed
        raise errors.Unavailable(f"{what}: {error}") from error
    except asyncio.CancelledError:
        # A channel that is closed cancels its calls, and grpc.aio raises that as if the caller's
        # task were cancelled. Only a real cancellation may pass as one.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise errors.Unavailable(f"{what}: the connection was closed on this side") from None


def from_rpc(error: grpc.aio.AioRpcError, what: str) -> errors.MusterError:
    """The MusterError that stands behind a status."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAIL:
            data = json.loads(value)
            kind = _KINDS.get(data["kind"]) or _kind(error)
            return kind(
                data["problem"], field=data["field"], value=data["value"], way_out=data["way_out"]
            )
    return _kind(error)(f"{what}: {error.code().name}: {error.details()}")


def _kind(error: grpc.aio.AioRpcError) -> type[errors.MusterError]:
    return _BY_CODE.get(error.code().name, errors.Unavailable)


_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.MusterError)
}
_BY_CODE: dict[str, type[errors.MusterError]] = {
    "INVALID_ARGUMENT": errors.InvalidInput,
    "NOT_FOUND": errors.NotFound,
    "FAILED_PRECONDITION": errors.Refused,
    "ABORTED": errors.Fenced,
    "RESOURCE_EXHAUSTED": errors.Exhausted,
    "INTERNAL": errors.MusterError,
    "UNIMPLEMENTED": errors.MusterError,
    "UNKNOWN": errors.MusterError,
}


class _Guard(grpc.aio.ServerInterceptor):
    """Deadline, authentication, trace context and error mapping around every method."""

    def __init__(self, auth: Authenticator):
        self._auth = auth

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        method = details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        metadata = {k: v for k, v in details.invocation_metadata or () if isinstance(v, str)}
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(handler.unary_stream, method, metadata),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(handler.unary_unary, method, metadata),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _admit(self, method: str, metadata: dict[str, str], context: Any) -> None:
        if context.time_remaining() is None:
            raise errors.InvalidInput(
                "the call has no deadline",
                field="deadline",
                value="none",
                way_out="set a timeout on the call",
            )
        self._auth.check(method, metadata)

    def _unary(self, inner: Any, method: str, metadata: dict[str, str]) -> Any:
        async def call(request: Any, context: Any) -> Any:
            with telemetry.span(method, parent=metadata.get("traceparent", "")):
                try:
                    self._admit(method, metadata, context)
                    return await inner(request, context)
                except errors.MusterError as error:
                    await _abort(context, error)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # noqa: BLE001 - the process's boundary: a status
                    await _bug(context, method, error)

        return call

    def _stream(self, inner: Any, method: str, metadata: dict[str, str]) -> Any:
        # Written, not yielded: a generator that gRPC drops is closed late and in another context.
        async def call(request: Any, context: Any) -> None:
            with telemetry.span(method, parent=metadata.get("traceparent", "")):
                responses = inner(request, context)
                try:
                    self._admit(method, metadata, context)
                    async for response in responses:
                        await context.write(response)
                except errors.MusterError as error:
                    await _abort(context, error)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # noqa: BLE001 - the process's boundary: a status
                    await _bug(context, method, error)
                finally:
                    if inspect.isasyncgen(responses):
                        await responses.aclose()

        return call


async def _abort(context: Any, error: errors.MusterError) -> None:
    detail = {
        "kind": type(error).__name__,
        "problem": _cut(error.problem, 2000),
        "field": _cut(error.field, 200),
        "value": _cut(error.value, 600),
        "way_out": _cut(error.way_out, 800),
    }
    _log.info("refused: %s", error)
    await context.abort(
        grpc.StatusCode[error.code],
        _cut(str(error), 500),
        ((_DETAIL, json.dumps(detail, ensure_ascii=False).encode()),),
    )


async def _bug(context: Any, method: str, error: Exception) -> None:
    if isinstance(error, NotImplementedError):  # what generated servicers raise
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not offered here")
    _log.error("bug in %s", method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "a bug of this service; its log has the details")


def _cut(text: str, size: int) -> str:
    """At most `size` bytes as JSON: a peer drops a status with more than 8 KiB of metadata."""
    text = text[:size].encode("utf-8", "replace").decode()
    if len(json.dumps(text, ensure_ascii=False).encode()) <= size:
        return text
    while len(json.dumps(text, ensure_ascii=False).encode()) > size - 5:
        text = text[: len(text) * 9 // 10]
    return text + "…"
