"""Is a started service ready: the embedded server answers PING, the others gRPC health.

Owns: the probes. Addresses come from the registry, as for every caller. Promise: `ready` returns
once the service says SERVING, and asks again for ever until then (the machine bounds the wait).
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError

from muster import rpc
from muster.registry import Registry
from muster.supervise.plan import Service

_EVERY_S = 0.2
_CALL_S = 1.0


class Health:
    """Probes of one run's services."""

    def __init__(self, redis_url: str, run: str):
        self._redis = Redis.from_url(
            redis_url, socket_timeout=_CALL_S, socket_connect_timeout=_CALL_S
        )
        self._registry = Registry(self._redis, run)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._redis.aclose()

    async def ready(self, service: Service) -> None:
        """Wait until the service can be used."""
        while True:
            if await self._check(service):
                return
            await asyncio.sleep(_EVERY_S)

    async def _check(self, service: Service) -> bool:
        try:
            if not service.health:
                return bool(await self._redis.ping())
            addresses = [entry.address for entry in await self._registry.list(service.name)]
        except (RedisError, OSError):
            return False
        for address in addresses:
            if await serving(address, service.health):
                return True
        return False


async def serving(address: str, name: str) -> bool:
    """True when the gRPC service `name` at `address` says SERVING."""
    async with rpc.channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=_CALL_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
