"""What is over goes from Redis: the mark, payloads, dedupe fields, stream entries.

Owns: those effects, and reading back at start how far they came. Promise: each may be repeated
after a crash, whole or in part; an entry is on disk (muster/history.py) before it leaves its
stream; of fates, batches and versions none goes that the router has not said it has read, and none
at all before it said anything. Does not cover: what is over (retire.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

import msgspec
from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from muster import failpoints
from muster.errors import Fenced
from muster.history import History
from muster.streams import Received, RunStreams, reaching_redis
from muster.v1 import events_pb2 as ev
from services.readybank import events as e

PAGE = 500

# KEYS: epoch key, mark. ARGV: epoch, step, opened. The mark only grows.
_MARK = """#!lua flags=allow-oom
local now = redis.call("GET", KEYS[1]) or "0"
if now ~= ARGV[1] then return now end
local before = tonumber(redis.call("HGET", KEYS[2], "step") or "0")
if tonumber(ARGV[2]) >= before then
  redis.call("HSET", KEYS[2], "step", ARGV[2], "opened", ARGV[3])
end
return ""
"""


class Clearing:
    """Of one run, for one bank."""

    def __init__(
        self,
        client: Redis,
        streams: RunStreams,
        history: History,
        gone: Callable[[str], bool],
        *,
        epoch: int,
    ):
        self._redis, self._streams, self._history, self._gone = client, streams, history, gone
        self._epoch, self._mark = epoch, client.register_script(_MARK)

    async def restored(self, jobs: Iterable[str]) -> list[e.BankEvent]:
        """The mark and the retired groups, as events."""
        mark: Any = {}
        with reaching_redis():
            mark = await self._redis.hgetall(self._streams.key("mark"))
        found: list[e.BankEvent] = []
        if mark:
            opened = msgspec.json.decode(mark[b"opened"], type=tuple[float, ...])
            found.append(e.MarkRestored(int(mark[b"step"]), opened))
        for job in jobs:
            bits: Any = None
            with reaching_redis():
                bits = await self._redis.get(self._streams.key("retired", job))
            if bits:
                found.append(e.RetiredRestored(job, bits))
        return found

    async def mark(self, command: e.WriteMark) -> None:
        """Raises Fenced for a former bank."""
        keys = [self._streams.key("epoch", "readybank"), self._streams.key("mark")]
        args: list[int | bytes] = [
            self._epoch,
            command.step,
            msgspec.json.encode(command.opened),
        ]
        newer: Any = None
        with reaching_redis():
            newer = await self._mark(keys=keys, args=args)
        if newer:
            raise self._fenced(newer)

    async def trainer_epoch(self) -> int:
        """The newest that a trainer has taken; 0 before the first."""
        newest: Any = None
        with reaching_redis():
            newest = await self._redis.get(self._streams.key("epoch", "trainer"))
        return int(newest or 0)

    async def in_charge(self) -> bool:
        """False when a newer bank is."""
        newest: Any = None
        with reaching_redis():
            newest = await self._redis.get(self._streams.key("epoch", "readybank"))
        return int(newest or 0) == self._epoch

    def _fenced(self, newer: bytes) -> Fenced:
        return Fenced(
            f"a newer readybank owns run {self._streams.run}",
            field="epoch of readybank",
            value=self._epoch,
            way_out=f"stop: epoch {newer.decode()} is in charge",
        )

    async def retire(self, over: e.GroupOver) -> None:
        """Raises Fenced for a former bank."""
        await failpoints.at("readybank.retire.before")
        if over.totals:
            await self._streams.retire(
                over.group, job=over.job, index=over.index, totals=over.totals, delete=over.keys
            )
        else:  # a late entry: what it names goes, and nothing is counted again
            await self._streams.drop(over.keys)
        await failpoints.at("readybank.retire.after")

    async def trim(self, command: e.TrimStreams) -> None:
        """Page by page, so that a crash leaves little to do again."""
        for stream, first in (("events", command.events), ("outcomes", command.outcomes)):
            if first:
                await self._below(stream, first)
        newest = await self._newest_versions()

        def version_over(message: Received) -> bool:
            record = ev.PolicyVersionRecord.FromString(message.data)
            none = record.stage == ev.VERSION_STAGE_UNSPECIFIED
            return none or (record.version < command.version and message.id not in newest)

        def batch_over(message: Received) -> bool:
            return ev.BatchRecord.FromString(message.data).step < command.step

        def fate_over(message: Received) -> bool:
            group = ev.GroupFate.FromString(message.data).group
            return not group or self._gone(group)

        read = await self._streams.read_by("router")
        for stream, over, field in (
            ("versions", version_over, _version_field),
            ("batches", batch_over, _batch_field),
            ("fates", fate_over, None),  # theirs went when the groups were retired
        ):
            await self._while(stream, over, read.get(stream, "0"), field)

    async def _below(self, stream: str, first_kept: str) -> None:
        while page := await self._page(stream, f"({first_kept}"):
            await self._drop(stream, page)

    async def _while(
        self,
        stream: str,
        over: Callable[[Received], bool],
        read: str,
        field: Callable[[Received], str] | None,
    ) -> None:
        """Drop from the beginning, up to what was read, as long as entries are over; unreadable
        ones are. Their dedupe fields go with them."""
        while page := await self._page(stream, read):
            cut = list(takewhile(lambda m: _over(m, over), page))
            if cut:
                await self._drop(stream, cut, [_field(m, field) for m in cut] if field else ())
            if len(cut) < len(page):
                return

    async def _page(self, stream: str, last: str) -> list[Received]:
        page: Any = []
        with reaching_redis():
            page = await self._redis.xrange(self._streams.key(stream), max=last, count=PAGE)
        return [
            Received(
                stream,
                id_.decode(),
                fields.get(b"d", b""),
                fields.get(b"traceparent", b"").decode("ascii", "replace"),
            )
            for id_, fields in page
        ]

    async def _drop(self, stream: str, entries: list[Received], forget: Sequence[str] = ()) -> None:
        await failpoints.at("readybank.archive.before")
        await asyncio.to_thread(self._history.append, entries)
        await failpoints.at("readybank.archive.after")
        at, _, number = entries[-1].id.partition("-")
        await failpoints.at("readybank.trim.before")
        await self._streams.trim(stream, f"{at}-{int(number) + 1}", forget)
        await failpoints.at("readybank.trim.after")

    async def _newest_versions(self) -> set[str]:
        """Ids of the newest record of each stage."""
        newest: dict[int, tuple[int, str]] = {}
        for message in await self._streams.read_all("versions"):
            try:
                record = ev.PolicyVersionRecord.FromString(message.data)
            except DecodeError:
                continue
            known = newest.get(record.stage, (-1, ""))
            newest[record.stage] = max(known, (record.version, message.id))
        return {id_ for _, id_ in newest.values()}


def _over(message: Received, over: Callable[[Received], bool]) -> bool:
    try:
        return over(message)
    except DecodeError:
        return True  # it is in the dead letters, and goes to the archive


def _field(message: Received, field: Callable[[Received], str]) -> str:
    try:
        return field(message)
    except DecodeError:
        return ""


def _version_field(message: Received) -> str:
    record = ev.PolicyVersionRecord.FromString(message.data)
    return f"{record.version}/{record.stage}"


def _batch_field(message: Received) -> str:
    record = ev.BatchRecord.FromString(message.data)
    stage = "trained" if record.stage == ev.BATCH_STAGE_TRAINED else "frozen"
    return f"{record.step}/{stage}"
