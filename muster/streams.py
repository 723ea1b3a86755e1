"""The Redis streams of a run: fenced, idempotent, atomic appends; ordered reads.

Owns: key names, the scripts. Promise: a set of entries and payloads is written whole or not at all;
a former owner (older epoch) is refused and counted; an entry whose dedupe field was seen is left
out, so a retry after a lost reply has the effect of one call. Does not cover: what the entries mean
(codec.py, the services), when something is retired or trimmed (the bank), the connection and its
troubles (redis_link.py), what survives a power cut (durability.py).

Keys, all under the hash tag {run}:
`m:{run}:events|outcomes|versions|fates|batches|jobs|evaluations|dead` (streams),
`m:{run}:epoch:ROLE` (owners, counted), `m:{run}:epoch:ROLE:fenced` (refused writes, counted),
`m:{run}:seen:SCOPE` (hashes of dedupe fields; that of a group goes when the group is retired),
`m:{run}:p:EPISODE.TURN` (tokens), `m:{run}:o:EPISODE.TURN` (output of a step),
`m:{run}:task:DIGEST` (task packages), `m:{run}:totals:JOB` (what retired groups add up to),
`m:{run}:retired:JOB` (one bit per retired group), `m:{run}:read:router` (how far it has read),
`m:{run}:mark` (the newest step that is trained for good, and how old the newest batches were).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from muster import telemetry
from muster.errors import Fenced, Refused
from muster.redis_link import RESERVE, STRICT, on_disk
from muster.redis_link import connect as connect
from muster.redis_link import reaching_redis as reaching_redis
from muster.types import Value
from muster.v1 import events_pb2 as ev

_log = telemetry.logger("muster.streams")
STREAMS = ("events", "outcomes", "versions", "fates", "batches", "jobs", "evaluations")
DEAD = "dead"  # entries that could not be read, with the reason
_REASON_MAX = 500

# All scripts go on so. KEYS[1]: epoch key. ARGV[1]: epoch ("" = not fenced).
_FENCE = """
if ARGV[1] ~= "" then
  local now = redis.call("GET", KEYS[1]) or "0"
  if now ~= ARGV[1] then
    redis.call("INCR", KEYS[1] .. ":fenced")
    return {"FENCED", now}
  end
end
"""

# KEYS: epoch key, then per entry its stream, its dedupe hash and its bits, then the payload keys.
# ARGV: epoch, entries n, then n times (dedupe field, field that must be there already or "", bit
# that must not be set or "", number of fields, fields...), then one value per payload key.
# Answers {"OK" or "CLOSED", id or "" per entry}, or {"GONE", dedupe field} when a bit is set.
# Payloads go with their entries: what stands already keeps the payload that it came with.
_APPEND = (
    _FENCE
    + """
local n, at, answer, new = tonumber(ARGV[2]), 3, {"OK"}, false
for i = 1, n do
  local bit = ARGV[at + 2]
  if bit ~= "" and redis.call("GETBIT", KEYS[3 * i + 1], bit) == 1 then
    return {"GONE", ARGV[at]}
  end
  at = at + 4 + tonumber(ARGV[at + 3])
end
at = 3
for i = 1, n do
  local stream, seen = KEYS[3 * i - 1], KEYS[3 * i]
  local field, needs, count = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 3])
  local entry = {}
  for j = 1, count do entry[j] = ARGV[at + 3 + j] end
  at = at + 4 + count
  answer[i + 1] = ""
  if needs == "" or redis.call("HEXISTS", seen, needs) == 1 then
    if redis.call("HSETNX", seen, field, "1") == 1 then
      answer[i + 1] = redis.call("XADD", stream, "*", unpack(entry))
      new = true
    end
  else
    answer[1] = "CLOSED"
  end
end
if answer[1] == "OK" and (new or n == 0) then
  for i = 3 * n + 2, #KEYS do
    redis.call("SET", KEYS[i], ARGV[at])
    at = at + 1
  end
end
return answer
"""
)

# KEYS: epoch key, dedupe hash of the group, that of the fates, totals, bits, then keys to delete.
# ARGV: epoch, group, index, then pairs (total, what to add). Answers {"OK", 1 or 0: done before}.
_RETIRE = (
    RESERVE
    + _FENCE
    + """
if redis.call("EXISTS", KEYS[2]) == 0 then return {"OK", "0"} end
for i = 4, #ARGV, 2 do redis.call("HINCRBY", KEYS[4], ARGV[i], ARGV[i + 1]) end
redis.call("SETBIT", KEYS[5], ARGV[3], 1)
redis.call("HDEL", KEYS[3], ARGV[2])
for i = 6, #KEYS do redis.call("UNLINK", KEYS[i]) end
redis.call("UNLINK", KEYS[2])
return {"OK", "1"}
"""
)

# KEYS: epoch key, stream, its dedupe hash. ARGV: epoch, first id to keep, then the dedupe fields
# that go too. Answers {"OK", entries that went}.
_TRIM = (
    RESERVE
    + _FENCE
    + """
for i = 3, #ARGV do redis.call("HDEL", KEYS[3], ARGV[i]) end
return {"OK", tostring(redis.call("XTRIM", KEYS[2], "MINID", ARGV[2]))}
"""
)

# KEYS: epoch key, then what goes. ARGV: epoch.
_DROP = (
    RESERVE
    + _FENCE
    + """
for i = 2, #KEYS do redis.call("UNLINK", KEYS[i]) end
return {"OK"}
"""
)

# KEYS: epoch key, the reader's hash. ARGV: epoch, then pairs (stream, newest id read).
_MARK_READ = (
    RESERVE
    + _FENCE
    + """
for i = 2, #ARGV, 2 do redis.call("HSET", KEYS[2], ARGV[i], ARGV[i + 1]) end
return {"OK"}
"""
)

# KEYS: epoch key, mark. ARGV: epoch, step, opened. The mark never goes back.
_ADVANCE_MARK = (
    RESERVE
    + _FENCE
    + """
if tonumber(ARGV[2]) >= tonumber(redis.call("HGET", KEYS[2], "step") or "0") then
  redis.call("HSET", KEYS[2], "step", ARGV[2], "opened", ARGV[3])
end
return {"OK"}
"""
)

_NEXT_EPOCH = RESERVE + 'return redis.call("INCR", KEYS[1])'


class StreamEntry(Value, frozen=True):
    """One message to append. `dedupe` within `scope` is written at most once.

    `needs`: the dedupe field of the same scope that must have been written before, else nothing
    is (a group that was retired takes no late entry). `unless_bit`: the parts of the name of a bit
    field and a bit there: while it is set, the whole call is refused (such a group is not opened
    again).
    """

    stream: str
    scope: str
    dedupe: str
    data: bytes
    plain: tuple[tuple[str, str], ...] = ()
    needs: str = ""
    unless_bit: tuple[tuple[str, ...], int] | None = None


class Received(Value, frozen=True):
    """One message read back. `id` orders messages within a stream."""

    stream: str
    id: str
    data: bytes
    traceparent: str


def dead_entry(message: Received, reason: str) -> StreamEntry:
    """An entry that could not be read, as it is kept for people."""
    where = f"{message.stream}/{message.id}"
    plain = (("stream", message.stream), ("id", message.id), ("reason", reason[:_REASON_MAX]))
    return StreamEntry(DEAD, DEAD, where, message.data, plain)


class RunStreams:
    """The streams of one run, written under one role's epoch."""

    def __init__(self, client: Redis, run: str, *, role: str = "", epoch: int | None = None):
        self._redis, self.run, self._role, self._epoch = client, run, role, epoch
        # Only the router's records grow with the work; the others' let it come to an end.
        flags = STRICT if role == "router" else RESERVE
        self._append = client.register_script(flags + _APPEND)
        self._retire = client.register_script(_RETIRE)
        self._trim = client.register_script(_TRIM)
        self._drop = client.register_script(_DROP)
        self._mark_read = client.register_script(_MARK_READ)
        self._advance_mark = client.register_script(_ADVANCE_MARK)

    def key(self, *parts: str) -> str:
        """Full name of a key of this run."""
        return ":".join((f"m:{{{self.run}}}", *parts))

    async def append(
        self, entries: Sequence[StreamEntry], payloads: Mapping[str, bytes] | None = None
    ) -> list[bool]:
        """Write all entries in one step, with the payloads when one is new; True where it was.

        Raises Fenced for a former owner, Refused when an entry's `unless_bit` is set, Unavailable
        when Redis does not answer.
        """
        payloads = payloads or {}
        trace = telemetry.traceparent()
        keys = [self.key("epoch", self._role)]
        args: list[bytes | str] = [self._fence, str(len(entries))]
        for entry in entries:
            seen = self.key("seen", entry.scope)
            field, bit = entry.unless_bit or ((), "")
            keys += [self.key(entry.stream), seen, self.key(*field) if field else seen]
            fields: list[bytes | str] = ["d", entry.data]
            fields += [part for pair in entry.plain for part in pair]
            fields += ["traceparent", trace] if trace else []
            args += [entry.dedupe, entry.needs, str(bit), str(len(fields)), *fields]
        keys += list(payloads)
        args += list(payloads.values())
        with reaching_redis():
            answer = self._unfenced(await self._append(keys=keys, args=args))
        return [bool(id_) for id_ in answer]

    async def retire(
        self, group: str, *, job: str, index: int, totals: Mapping[str, int], delete: Sequence[str]
    ) -> bool:
        """Drop what a group that has its fate still holds, and count it, in one step.

        `delete`: its payload keys. False when it was done before. Raises as `append` does.
        """
        keys = [
            self.key("epoch", self._role),
            self.key("seen", f"g:{group}"),
            self.key("seen", "fates"),
            self.key("totals", job),
            self.key("retired", job),
            *delete,
        ]
        args = [self._fence, group, str(index)]
        for name, added in totals.items():
            args += [name, str(added)]
        with reaching_redis():
            answer = self._unfenced(await self._retire(keys=keys, args=args))
        return bool(answer[0] == b"1")

    async def trim(self, stream: str, first_kept: str, forget: Sequence[str] = ()) -> int:
        """Drop every entry below an id; how many went. Raises as `append` does.

        `forget`: dedupe fields, in the scope named as the stream, that go with them.
        """
        keys = [self.key("epoch", self._role), self.key(stream), self.key("seen", stream)]
        with reaching_redis():
            args = [self._fence, first_kept, *forget]
            answer = self._unfenced(await self._trim(keys=keys, args=args))
        return int(answer[0])

    async def drop(self, payloads: Sequence[str]) -> None:
        """Delete payload keys. Raises as `append` does."""
        with reaching_redis():
            keys = [self.key("epoch", self._role), *payloads]
            self._unfenced(await self._drop(keys=keys, args=[self._fence]))

    async def mark_read(self, positions: Mapping[str, str]) -> None:
        """Say how far this role has read streams (stream → id): nothing beyond is trimmed."""
        with reaching_redis():
            keys = [self.key("epoch", self._role), self.key("read", self._role)]
            args = [self._fence, *(part for pair in positions.items() for part in pair)]
            self._unfenced(await self._mark_read(keys=keys, args=args))

    async def advance_mark(self, step: int, opened: bytes) -> None:
        """Steps up to this one are trained for good; a smaller step than before changes nothing.

        Raises as `append` does.
        """
        keys = [self.key("epoch", self._role), self.key("mark")]
        with reaching_redis():
            self._unfenced(await self._advance_mark(keys=keys, args=[self._fence, step, opened]))

    async def read_by(self, role: str) -> dict[str, str]:
        """What that role said with `mark_read`; nothing before it did."""
        found: Any = {}
        with reaching_redis():
            found = await self._redis.hgetall(self.key("read", role))
        return {stream.decode(): id_.decode() for stream, id_ in found.items()}

    @property
    def _fence(self) -> str:
        return "" if self._epoch is None else str(self._epoch)

    def _unfenced(self, answer: list[bytes]) -> list[bytes]:
        """The answer of a script without its status."""
        if answer[0] == b"FENCED":
            raise Fenced(
                f"a newer {self._role} owns run {self.run}",
                field=f"epoch of {self._role}",
                value=self._epoch,
                way_out=f"stop: epoch {answer[1].decode()} is in charge",
            )
        if answer[0] == b"GONE":
            raise Refused(
                "it is over, and was counted and deleted, while it was being opened again",
                field="dedupe",
                value=answer[1].decode(),
                way_out="stop, start again and read what is there",
            )
        return answer[1:]

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


async def next_epoch(client: Redis, run: str, role: str) -> int:
    """Take over `role`: every former owner is fenced from now on.

    On disk where the server can tell: a power cut must not let the same number be given again.
    """
    return int(await on_disk(client, _NEXT_EPOCH, [f"m:{{{run}}}:epoch:{role}"], []))


async def latest_version(
    client: Redis, run: str, stage: ev.VersionStage.ValueType
) -> ev.PolicyVersionRecord | None:
    """The newest record of that stage, None before the first."""
    newest = None
    for message in await RunStreams(client, run).read_all("versions"):
        record = version_record(message)
        if record and record.stage == stage:
            if newest is None or record.version >= newest.version:
                newest = record
    return newest


def version_record(message: Received) -> ev.PolicyVersionRecord | None:
    """What an entry of `versions` says; None, and a line in the log, when no trainer wrote it.

    The bank and the router put such an entry among the dead letters; nobody stops because of it.
    """
    try:
        record = ev.PolicyVersionRecord.FromString(message.data)
        if record.stage != ev.VERSION_STAGE_UNSPECIFIED:
            return record
        reason = "it has no stage"
    except DecodeError as error:
        reason = str(error)
    _log.error("entry %s of stream versions is left out: %s", message.id, reason)
    return None
