"""Which process of a role is in charge of a run: one active, the others stand by.

Owns: the heartbeat key `m:{run}:leader:ROLE`, the wait for it, the watch over one's own epoch.
Promise: at most one process is told to lead while heartbeats and clocks behave; whatever they do,
each leader has its own epoch, every former one is fenced by it, and learns that within a beat.
Safety is the epoch's alone (streams.py, and each service's checks); the key is liveness only. A
server of the streams that was restarted may have lost what it acknowledged last; a leader remembers
that, and would build on it: it ends, and the next one reads what is there.
Does not cover: what a leader does, or how its clients find it (registry.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from muster import telemetry
from muster.clock import monotonic
from muster.errors import Fenced, Refused, Unavailable
from muster.redis_link import RESERVE, ServerWatch
from muster.streams import next_epoch, reaching_redis
from muster.tasks import end

_log = telemetry.logger("muster.leader")

# Take the key when it is absent or ours, and set its time to live. KEYS: key. ARGV: me, ttl in ms.
_TAKE = (
    RESERVE
    + """
local now = redis.call("GET", KEYS[1])
if now and now ~= ARGV[1] then
  -- The server's clock went back: a dead leader's key would stay for as long.
  if redis.call("PTTL", KEYS[1]) > tonumber(ARGV[2]) then
    redis.call("PEXPIRE", KEYS[1], ARGV[2])
  end
  return 0
end
redis.call("SET", KEYS[1], ARGV[1], "PX", ARGV[2])
return 1
"""
)
# Give it up, when it is ours; the counter of epochs is not left below ours, where a power cut may
# have put it: the next epoch must be new to everybody who has seen this one.
# KEYS: key, counter. ARGV: me, epoch.
_GIVE = (
    RESERVE
    + """
if tonumber(redis.call("GET", KEYS[2]) or "0") < tonumber(ARGV[2]) then
  redis.call("SET", KEYS[2], ARGV[2])
end
if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("DEL", KEYS[1]) end
return 0
"""
)
# The same, when the name of its holder begins so. ARGV: beginning of the name.
_BURY = """
local now = redis.call("GET", KEYS[1])
if now and string.sub(now, 1, #ARGV[1]) == ARGV[1] then return redis.call("DEL", KEYS[1]) end
return 0
"""


class Leadership:
    """One process's try at leading. `epoch` is its fence once `lead` has answered."""

    def __init__(
        self,
        redis: Redis,
        run: str,
        role: str,
        *,
        beat_s: float = 0.5,
        ttl_s: float = 3.0,
        patience_s: float = 60.0,
        end_s: float = 3.0,
        keeps_all: bool = True,
    ):
        """`keeps_all`: the server loses nothing that it has acknowledged, whatever happens. Else
        the client is one of redis_link.connect, and used by this leader alone."""
        self._keeps_all = keeps_all
        self._redis, self._run, self._role = redis, run, role
        self._beat_s, self._ttl_ms = beat_s, int(ttl_s * 1000)
        self._patience_s, self._end_s = patience_s, end_s
        self._watchdog: asyncio.TimerHandle | None = None
        self._key = f"m:{{{run}}}:leader:{role}"
        self._epoch_key = f"m:{{{run}}}:epoch:{role}"
        self._me = f"{_name(socket.gethostname(), os.getpid())}{secrets.token_hex(8)}"
        self._take, self._give = redis.register_script(_TAKE), redis.register_script(_GIVE)
        self.epoch = 0
        self.stood_by = False  # another led when this one came
        self._may_lead = False

    async def stand_by(self, stopping: asyncio.Event) -> bool:
        """Wait until no other leads; False when `stopping` came first. Takes no epoch yet."""
        while not stopping.is_set():
            try:
                with reaching_redis():
                    self._may_lead = bool(
                        await self._take(keys=[self._key], args=[self._me, self._ttl_ms])
                    )
                if self._may_lead:
                    return True
                if not self.stood_by:
                    _log.info("stands by: another leads", extra={"role": self._role})
                    self.stood_by = True
            except Unavailable as error:
                _log.warning("cannot tell who leads: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_s):
                    await stopping.wait()
        return False

    @asynccontextmanager
    async def lead(self) -> AsyncIterator[int]:
        """Take the next epoch; heartbeats inside the block. After `stand_by` has said True.

        The block ends with Fenced when a newer leader has taken over, with Refused when the server
        may have lost records; the process ends with status 2 when the block has not ended `end_s`
        later.
        """
        if not self._may_lead:
            raise AssertionError("stand_by() has not said that this process may lead")
        try:
            async with asyncio.TaskGroup() as tasks:
                # From now on: an epoch takes its time, and the others must not get impatient.
                beat = tasks.create_task(self._beat(), name=f"lead-{self._role}")
                try:
                    self.epoch = await self._next_epoch()
                    _log.info("leads", extra={"role": self._role, "epoch": self.epoch})
                    yield self.epoch
                finally:
                    await end(beat)
        finally:
            await self._resign()
            if self._watchdog is not None:
                self._watchdog.cancel()

    async def _next_epoch(self) -> int:
        """Repeated while Redis is away: an epoch whose answer was lost is nobody's."""
        deadline = monotonic() + self._patience_s
        while True:
            try:
                if not self._keeps_all:  # nothing was read yet: whatever it lost, nobody knew
                    await ServerWatch.of(self._redis).count_on(self._redis)
                return await next_epoch(self._redis, self._run, self._role)
            except Unavailable as error:
                if monotonic() >= deadline:
                    raise
                _log.warning("cannot take an epoch: %s", error)
            await asyncio.sleep(self._beat_s)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self._once()
            except Unavailable as error:
                _log.warning("heartbeat of %s failed: %s", self._role, error)
            except Refused as error:
                _log.error("ends: %s", error)
                loop = asyncio.get_running_loop()
                self._watchdog = loop.call_later(self._end_s, self._end_hard, error)
                raise

    def _end_hard(self, error: Refused) -> None:
        """What a former owner still waits for does not matter: its role is in other hands."""
        left = sorted(task.get_name() for task in asyncio.all_tasks() if not task.done())
        _log.error("hard exit after %.0f s more; still running: %s", self._end_s, left)
        sys.stderr.write(f"{self._role}: {error}\n")
        sys.stderr.flush()
        os._exit(2)

    async def _once(self) -> None:
        with reaching_redis():
            if self.epoch:
                self._same_server()
                newest = int(await self._redis.get(self._epoch_key) or 0)
                if newest != self.epoch:
                    raise self._fenced(f"stop: epoch {newest} is in charge")
            taken = await self._take(keys=[self._key], args=[self._me, self._ttl_ms])
            if self.epoch and not taken:
                raise self._fenced("stop: it takes its epoch next")

    def _fenced(self, way_out: str) -> Fenced:
        return Fenced(
            f"a newer {self._role} leads run {self._run}",
            field=f"epoch of {self._role}",
            value=self.epoch,
            way_out=way_out,
        )

    def _same_server(self) -> None:
        """Raises Refused when the server was restarted: no call reaches it since (redis_link)."""
        if not self._keeps_all and ServerWatch.of(self._redis).restarted:
            raise Refused(
                "the server of the streams was restarted: with this redis.appendfsync its last "
                "writes may be gone, and this process still counts on them",
                field="redis.appendfsync",
                way_out="it is started again and reads what is there; `always` spares that",
            )

    async def _resign(self) -> None:
        """A courtesy: without it the next one waits for `ttl_s`, and may take an epoch again that
        a power cut has taken back."""
        try:
            if not self._keeps_all:
                ServerWatch.of(self._redis).forget()
            async with asyncio.timeout(1.0):
                with reaching_redis():
                    keys = [self._key, self._epoch_key]
                    await self._give(keys=keys, args=[self._me, self.epoch])
        except (Unavailable, TimeoutError) as error:
            _log.info("could not resign: %s", error)


def _name(host: str, pid: int) -> str:
    return f"{host}:{pid}/"


async def bury(redis: Redis, run: str, role: str, *, host: str, pid: int) -> bool:
    """Tell the standby at once that the process which led is dead; True when it did lead.

    For whoever has seen it die: without it the standby waits until the heartbeat's time is up.
    """
    with reaching_redis():
        give_up = redis.register_script(_BURY)
        return bool(await give_up(keys=[f"m:{{{run}}}:leader:{role}"], args=[_name(host, pid)]))
