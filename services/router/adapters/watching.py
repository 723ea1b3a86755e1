"""Who is announced, who knows this owner, what replicas say of themselves.

Owns: the looks at the registry, the claims, the questions for credits. Promise: a new process is
claimed before anything is asked of it; every announced replica is asked about once a second, and
one that is no longer announced for a while yet (that is no sign of its end); all are asked and
claimed at once and with a short deadline, so one that hangs does not keep the others waiting for
long. Does not cover: what follows from the answers (the machine).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from muster import telemetry
from muster.clock import monotonic
from muster.registry import Entry, Registry
from services.router import builders
from services.router import events as e
from services.router.adapters.calls import Calls

_log = telemetry.logger("router")
_POLL_S = 0.5
_ASK_S = 1.0  # between two questions for a credit on a KV cache
_UNLISTED_S = 60.0  # how long one that is no longer announced is asked


class FleetWatch:
    """Feeds what it sees; `poll` and `ask` run for ever."""

    def __init__(
        self,
        registry: Registry,
        calls: Calls,
        run: str,
        owner_epoch: int,
        feed: Callable[[e.RouterEvent], Awaitable[None]],
    ):
        self._registry, self._calls, self._feed = registry, calls, feed
        self._run, self._epoch = run, owner_epoch
        self._claimed: set[tuple[str, str, int]] = set()  # processes that know this owner's epoch
        self._replicas: tuple[str, ...] = ()
        self._unlisted: dict[str, float] = {}  # replica → since when it is not announced
        self._listed = asyncio.Event()  # the announced replicas have changed

    async def poll(self) -> None:
        """Look at the registry."""
        replicas: tuple[e.Replica, ...] = ()
        hosts: tuple[e.Host, ...] = ()
        while True:
            try:
                found = await self._registry.list("inference")
                boxes = await self._registry.list("sandbox")
            except RedisError as error:
                _log.warning("registry cannot be read: %s", error)
                await asyncio.sleep(_POLL_S)
                continue
            addresses = {entry.id: entry.address for entry in [*found, *boxes]}
            for channel in self._calls.addresses_are(addresses, monotonic()):
                await channel.close()
            await self._claim(found, boxes)
            now_replicas = tuple(e.Replica(r.id, r.address) for r in found)
            now_hosts = tuple(e.Host(h.id, h.address, builders.announced(h.info)) for h in boxes)
            if now_replicas != replicas:
                replicas = now_replicas
                await self._feed(e.ReplicasListed(replicas))
                self._are(tuple(r.id for r in replicas), monotonic())
                self._listed.set()
            if now_hosts != hosts:
                hosts = now_hosts
                await self._feed(e.HostsListed(hosts))
            await asyncio.sleep(_POLL_S)

    def _are(self, replicas: tuple[str, ...], now: float) -> None:
        gone = {*self._replicas, *self._unlisted} - set(replicas)
        self._unlisted = {id_: self._unlisted.get(id_, now) for id_ in gone}
        self._replicas = replicas

    async def ask(self) -> None:
        """Ask every announced replica for a credit; new ones at once."""
        while True:
            self._listed.clear()
            oldest = monotonic() - _UNLISTED_S
            self._unlisted = {id_: at for id_, at in self._unlisted.items() if at > oldest}
            async with asyncio.TaskGroup() as tasks:
                for replica in (*self._replicas, *self._unlisted):
                    tasks.create_task(self._ask(replica), name=f"ask-{replica}")
            try:
                async with asyncio.timeout(_ASK_S):
                    await self._listed.wait()
            except TimeoutError:
                continue

    async def _ask(self, replica: str) -> None:
        await self._feed(await self._calls.replicas.grant(self._run, replica, self._epoch))

    async def _claim(self, replicas: list[Entry], hosts: list[Entry]) -> None:
        """Make new processes know this owner's epoch, so that former ones are refused.

        A host that came back under its old id has forgotten it, and tells its boxes anew.
        """
        async with asyncio.TaskGroup() as tasks:
            for entry in replicas:
                if _process(entry) not in self._claimed:
                    tasks.create_task(self._claim_replica(entry), name=f"claim-{entry.id}")
            for entry in hosts:
                if _process(entry) not in self._claimed:
                    tasks.create_task(self._claim_host(entry), name=f"claim-{entry.id}")
        self._claimed &= {_process(entry) for entry in (*replicas, *hosts)}

    async def _claim_replica(self, entry: Entry) -> None:
        if await self._calls.replicas.claim(self._run, entry.id, self._epoch):
            self._claimed.add(_process(entry))

    async def _claim_host(self, entry: Entry) -> None:
        boxes = await self._calls.claim_host(self._run, entry.id, self._epoch)
        if boxes is not None:
            self._claimed.add(_process(entry))
            await self._feed(boxes)


def _process(entry: Entry) -> tuple[str, str, int]:
    return entry.id, entry.address, entry.incarnation
