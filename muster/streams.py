"""The Redis streams of a run: fenced, idempotent, atomic appends; ordered reads.

Owns: key names, the append script, connections. Promise: a set of entries and payloads is written
whole or not at all; a former owner (older epoch) is refused; an entry whose dedupe field was seen
is skipped, so a retry after a lost reply has the effect of one call. Does not cover: what the
entries mean (codec.py, the services), trimming.

Keys, all under the hash tag {run}: `m:{run}:events|outcomes|versions|fates|batches|jobs` (streams),
`m:{run}:epoch:ROLE` (counters), `m:{run}:seen:SCOPE` (hashes of dedupe fields),
`m:{run}:p:EPISODE.SEQ` and `m:{run}:task:DIGEST` (payloads).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.exceptions as failures
from redis.asyncio import BlockingConnectionPool, Redis

from muster import telemetry
from muster.config import RedisConfig
from muster.errors import ConfigError, Fenced, Unavailable
from muster.types import Value
from muster.v1 import events_pb2 as ev

STREAMS = ("events", "outcomes", "versions", "fates", "batches", "jobs")

# KEYS: epoch key, then per entry its stream and its dedupe hash, then the payload keys.
# ARGV: epoch ("" = not fenced), entries n, then n × (dedupe field, number of fields, fields…),
# then one value per payload key. Answers {"FENCED", epoch} or {"OK", id or "" per entry}.
_APPEND = """
local epoch = ARGV[1]
if epoch ~= "" then
  local now = redis.call("GET", KEYS[1]) or "0"
  if now ~= epoch then return {"FENCED", now} end
end
local n, at, answer = tonumber(ARGV[2]), 3, {"OK"}
for i = 1, n do
  local stream, seen = KEYS[2 * i], KEYS[2 * i + 1]
  local field, count = ARGV[at], tonumber(ARGV[at + 1])
  local entry = {}
  for j = 1, count do entry[j] = ARGV[at + 1 + j] end
  at = at + 2 + count
  if redis.call("HSETNX", seen, field, "1") == 1 then
    answer[i + 1] = redis.call("XADD", stream, "*", unpack(entry))
  else
    answer[i + 1] = ""
  end
end
for i = 2 * n + 2, #KEYS do
  redis.call("SET", KEYS[i], ARGV[at])
  at = at + 1
end
return answer
"""


class StreamEntry(Value, frozen=True):
    """One message to append. `dedupe` within `scope` is written at most once."""

    stream: str
    scope: str
    dedupe: str
    data: bytes
    plain: tuple[tuple[str, str], ...] = ()


class Received(Value, frozen=True):
    """One message read back. `id` orders messages within a stream."""

    stream: str
    id: str
    data: bytes
    traceparent: str


@asynccontextmanager
async def connect(config: RedisConfig) -> AsyncIterator[Redis]:
    """A checked client: reachable, and durable unless the configuration says otherwise."""
    if not config.url:
        raise ConfigError(
            "no Redis is configured",
            field="redis.url",
            way_out="name a server, or start everything with `muster up`, which brings its own",
        )
    try:
        pool = BlockingConnectionPool.from_url(
            config.url,
            max_connections=config.connections_max,
            timeout=config.timeout_s,
            socket_connect_timeout=config.timeout_s,
            socket_timeout=config.timeout_s,
        )
    except ValueError as error:
        raise ConfigError(
            "not the address of a Redis server",
            field="redis.url",
            value=_shown(config.url),
            way_out="write redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix://PATH",
        ) from error
    client = Redis(connection_pool=pool)
    try:
        await _check(client, config)
        yield client
    finally:
        await client.aclose()
        await pool.aclose()


async def _check(client: Redis, config: RedisConfig) -> None:
    try:
        persistence: Mapping[str, Any] = await client.info("persistence")
    except (failures.ConnectionError, failures.TimeoutError, OSError) as error:
        raise Unavailable(
            f"Redis cannot be reached ({error})",
            field="redis.url",
            value=_shown(config.url),
            way_out="start it or correct the address; without redis.url `muster up` brings its own",
        ) from error
    if not persistence.get("aof_enabled") and not config.allow_volatile:
        raise ConfigError(
            "this Redis keeps no append-only file: finished trajectories would be lost with it",
            field="redis.url",
            value=_shown(config.url),
            way_out="set `appendonly yes` there, or redis.allow_volatile = true to accept that",
        )


def _shown(url: str) -> str:
    """The address without its credentials: it stands in errors and logs."""
    scheme, slashes, rest = url.partition("://")
    head, query, _ = rest.partition("?")
    return f"{scheme}{slashes}{head.rpartition('@')[2]}{query and '?…'}"


class RunStreams:
    """The streams of one run, written under one role's epoch."""

    def __init__(self, client: Redis, run: str, *, role: str = "", epoch: int | None = None):
        self._redis, self.run, self._role, self._epoch = client, run, role, epoch
        self._script = client.register_script(_APPEND)

    def key(self, *parts: str) -> str:
        """Full name of a key of this run."""
        return ":".join((f"m:{{{self.run}}}", *parts))

    async def append(
        self, entries: Sequence[StreamEntry], payloads: Mapping[str, bytes] | None = None
    ) -> list[bool]:
        """Write all entries and payloads in one step; True where an entry was new.

        Raises Fenced for a former owner, Unavailable when Redis does not answer.
        """
        payloads = payloads or {}
        trace = telemetry.traceparent()
        keys = [self.key("epoch", self._role)]
        args: list[bytes | str] = [
            "" if self._epoch is None else str(self._epoch),
            str(len(entries)),
        ]
        for entry in entries:
            keys += [self.key(entry.stream), self.key("seen", entry.scope)]
            fields: list[bytes | str] = ["d", entry.data]
            fields += [part for pair in entry.plain for part in pair]
            fields += ["traceparent", trace] if trace else []
            args += [entry.dedupe, str(len(fields)), *fields]
        keys += list(payloads)
        args += list(payloads.values())
        with reaching_redis():
            answer = await self._script(keys=keys, args=args)
        if answer[0] == b"FENCED":
            raise Fenced(
                f"a newer {self._role} owns run {self.run}",
                field=f"epoch of {self._role}",
                value=self._epoch,
                way_out=f"stop: epoch {answer[1].decode()} is in charge",
            )
        return [bool(id_) for id_ in answer[1:]]

    async def read_all(self, stream: str, after: str = "-") -> list[Received]:
        """Every message of a stream in order, from the first or after an id."""
        found: list[Received] = []
        start = after if after == "-" else f"({after}"
        while True:
            page: Any
            with reaching_redis():
                page = await self._redis.xrange(self.key(stream), min=start, count=1000)
            found += [self._received(stream, id_, fields) for id_, fields in page]
            if len(page) < 1000:
                return found
            start = f"({found[-1].id}"

    async def tail(self, after: Mapping[str, str], block_ms: int = 1000) -> list[Received]:
        """Wait at most `block_ms` for messages after the given ids, by stream name."""
        names = {self.key(stream).encode(): stream for stream in after}
        reply_s = self._redis.connection_pool.connection_kwargs.get("socket_timeout")
        if reply_s:  # else the wait would look like a server that hangs
            block_ms = min(block_ms, max(1, int(reply_s * 500)))
        answer: Any
        with reaching_redis():
            answer = await self._redis.xread(
                {self.key(stream): id_ for stream, id_ in after.items()},
                count=1000,
                block=block_ms,
            )
        return [
            self._received(names[key], id_, fields)
            for key, page in answer or []
            for id_, fields in page
        ]

    @staticmethod
    def _received(stream: str, id_: bytes, fields: Mapping[bytes, bytes]) -> Received:
        trace = fields.get(b"traceparent", b"").decode("ascii", "replace")
        return Received(stream, id_.decode(), fields.get(b"d", b""), trace)

    async def payloads(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of payload keys, None where there is none."""
        found: Any = []
        with reaching_redis():
            found = await self._redis.mget(keys) if keys else []
        return list(found)


class reaching_redis:
    """Turns what passes by itself (no connection, a full or loading server) into Unavailable."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        transient = (
            failures.ConnectionError,
            failures.TimeoutError,
            failures.ReadOnlyError,
            failures.OutOfMemoryError,
            failures.TryAgainError,
        )
        named = isinstance(error, failures.ResponseError) and str(error).startswith(
            ("MISCONF", "NOREPLICAS", "BUSY", "MASTERDOWN")
        )
        if named or isinstance(error, transient):
            raise Unavailable(
                f"Redis does not answer ({error})", way_out="it is retried; see its log"
            ) from error


async def next_epoch(client: Redis, run: str, role: str) -> int:
    """Take over `role`: every former owner is fenced from now on."""
    with reaching_redis():
        return int(await client.incr(f"m:{{{run}}}:epoch:{role}"))


async def append_version(client: Redis, run: str, record: ev.PolicyVersionRecord) -> None:
    """Append a version record; equal (version, stage) pairs are written once."""
    dedupe = f"{record.version}/{record.stage}"
    entry = StreamEntry("versions", "versions", dedupe, record.SerializeToString())
    await RunStreams(client, run).append([entry])


async def latest_version(
    client: Redis, run: str, stage: ev.VersionStage.ValueType
) -> ev.PolicyVersionRecord | None:
    """The newest record of that stage, None before the first."""
    newest = None
    for message in await RunStreams(client, run).read_all("versions"):
        record = ev.PolicyVersionRecord.FromString(message.data)
        if record.stage == stage and (newest is None or record.version >= newest.version):
            newest = record
    return newest
