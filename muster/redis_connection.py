"""Connections to Redis in which no cancellation is lost.

Owns: `connection_options` and `client_at`. redis-py bounds its writes by `asyncio.wait_for`, which
before Python 3.12 goes on as if nothing had happened when it is cancelled while the write ends
(CPython issue 86296): a loop then goes on for ever, and a time limit around the call has passed
unseen. (`muster.tasks.end` cancels again and again; a time limit does not.)
Promise: a task that is cancelled in a call ends in that call, and the connection is not used again.
Does not cover: pools, limits, what a server must be able to do (redis_link.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)


class _Cancellable(AbstractConnection):
    """What a kind of connection is mixed with."""

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Raises CancelledError, too, when the library has swallowed it."""
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        await super().send_packed_command(command, check_health)
        if task and task.cancelling() > before:
            await self.disconnect(nowait=True)  # its answer would be taken for the next one's
            raise asyncio.CancelledError


class _Tcp(_Cancellable, Connection):
    pass


class _Tls(_Cancellable, SSLConnection):
    pass


class _Unix(_Cancellable, UnixDomainSocketConnection):
    pass


_KINDS: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _Tcp,
    SSLConnection: _Tls,
    UnixDomainSocketConnection: _Unix,
}


def connection_options(url: str, **options: Any) -> dict[str, Any]:
    """What a pool needs to connect to `url`, whose own settings (`?socket_timeout=3`) go before
    `options`. Raises ValueError when it is no address."""
    found: dict[str, Any] = dict(parse_url(url))
    found["connection_class"] = _KINDS[found.get("connection_class", Connection)]
    return options | found


def client_at(url: str, **options: Any) -> Redis:
    """An unchecked client, as `Redis.from_url` makes one; the caller closes it."""
    return Redis.from_pool(ConnectionPool(**connection_options(url, **options)))
