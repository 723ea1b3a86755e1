"""Is a started service ready: the embedded server answers PING, the others gRPC health.

Owns: the probes, and whom a role's leader listens as. Addresses come from the registry, as for
every caller. Promise: `ready` returns once exactly this process says SERVING or is listed as
standing by, and asks again for ever until then (the machine bounds the wait).
"""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.exceptions import RedisError

from muster import rpc, telemetry
from muster.errors import Unavailable
from muster.leader import bury
from muster.redis_connection import client_at
from muster.registry import Entry, Registry
from muster.supervise.plan import STANDBYS, Service

_log = telemetry.logger("muster.supervise")
_EVERY_S = 0.2
_CALL_S = 1.0


class Health:
    """Probes of one run's services."""

    def __init__(self, redis_url: str, run: str):
        limits = {"socket_timeout": _CALL_S, "socket_connect_timeout": _CALL_S}
        self._redis = client_at(redis_url, **limits)
        self._run, self._registry = run, Registry(self._redis, run)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._redis.aclose()

    async def ready(self, service: Service, pid: int | None) -> str:
        """Wait until the process can be used, or stands by; what to remark about it."""
        stood_by = False
        while True:
            if await self._serves(service, pid):
                return ""
            stands_by = await self._stands_by(service, pid)
            # Twice: who comes to lead is listed so too, for the moment that it takes to find out.
            if stands_by and stood_by:
                return "stands by"
            stood_by = stands_by
            await asyncio.sleep(_EVERY_S)

    async def leader(self, role: str) -> Entry | None:
        """The newest listed process of a role; None when there is none, or Redis is away."""
        return next(reversed(await self._listed(role)), None)

    async def buried(self, role: str, pid: int) -> None:
        """Tell the standbys that a process of this machine is dead; when Redis is away, let be."""
        try:
            await bury(self._redis, self._run, role, host=socket.gethostname(), pid=pid)
        except (Unavailable, RedisError) as error:
            _log.info("the standby of %s finds out by itself: %s", role, error)

    async def _serves(self, service: Service, pid: int | None) -> bool:
        if not service.health:
            return await self._answers()
        # Others may be in a PID namespace of their own: what they think to be is not what we know.
        who = pid if service.kind in STANDBYS else None
        for entry in await self._listed(service.kind):
            named = not service.id or service.id == entry.id
            if named and _is(entry, who) and await serving(entry.address, service.health):
                return True
        return False

    async def _stands_by(self, service: Service, pid: int | None) -> bool:
        if service.kind not in STANDBYS or pid is None:
            return False
        return any(_is(entry, pid) for entry in await self._listed("standby"))

    async def _answers(self) -> bool:
        try:
            return bool(await self._redis.ping())
        except (RedisError, OSError):
            return False

    async def _listed(self, kind: str) -> list[Entry]:
        try:
            return await self._registry.list(kind)
        except (RedisError, OSError):
            return []


def _is(entry: Entry, pid: int | None) -> bool:
    """True for the entry of that process; of any, when it is not known."""
    return pid is None or (entry.pid, entry.host) == (pid, socket.gethostname())


async def serving(address: str, name: str) -> bool:
    """True when the gRPC service `name` at `address` says SERVING."""
    async with rpc.channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=_CALL_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
