"""What is over goes from Redis: the mark, payloads, dedupe fields, stream entries.

Owns: those effects, and reading back at start how far they came. Promise: each may be repeated
after a crash, whole or in part; an entry is on disk (muster/history.py) before it leaves its
stream; of fates, batches and versions none goes that the router has not said it has read, and none
at all before it said anything. Does not cover: what is over (retire.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

import msgspec
from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from muster import failpoints
from muster.evaluated import GROUPS_KEPT
from muster.stream_ids import id_after
from muster.streams import Received, RunStreams, reaching_redis
from muster.v1 import events_pb2 as ev
from services.readybank import events as e
from services.readybank.adapters import feed
from services.readybank.retire import (
    VersionKept,
    batch_over,
    fate_over,
    newest_of_stages,
    version_over,
)

PAGE = 500


class Clearing:
    """Of one run, for one bank."""

    def __init__(
        self,
        client: Redis,
        streams: RunStreams,
        archive: Callable[[list[Received]], Awaitable[None]],
        gone: Callable[[str], bool],
        *,
        epoch: int,
    ):
        """`archive` returns once the entries are safe elsewhere."""
        self._redis, self._streams, self._archive, self._gone = client, streams, archive, gone
        self._epoch = epoch

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
        await failpoints.at("readybank.mark.before")
        opened = msgspec.json.encode(command.opened)
        await self._streams.advance_mark(command.step, opened)
        await failpoints.at("readybank.mark.after")

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
        newest = newest_of_stages(await self._versions())

        def version(message: Received) -> bool:
            return version_over(_version(message), command.version, newest)

        def batch(message: Received) -> bool:
            return batch_over(ev.BatchRecord.FromString(message.data).step, command.step)

        def fate(message: Received) -> bool:
            return fate_over(ev.GroupFate.FromString(message.data).group, self._gone)

        read = await self._streams.read_by("router")
        for stream, over, field in (
            ("versions", version, _version_field),
            ("batches", batch, _batch_field),
            ("fates", fate, None),  # theirs went when the groups were retired
        ):
            await self._while(stream, over, read.get(stream, "0"), field)
        await self._evaluations()

    async def _evaluations(self) -> None:
        """All but the newest; nobody has to have read them."""
        with reaching_redis():
            excess = await self._redis.xlen(self._streams.key("evaluations")) - GROUPS_KEPT
        for cut in range(0, excess, PAGE):
            page = (await self._page("evaluations", "+"))[: excess - cut]
            names = [_field(m, _evaluated_field) for m in page]
            await self._drop("evaluations", page, names)

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
        await self._archive(entries)
        await failpoints.at("readybank.archive.after")
        await failpoints.at("readybank.trim.before")
        await self._streams.trim(stream, id_after(entries[-1].id), forget)
        await failpoints.at("readybank.trim.after")

    async def _versions(self) -> list[VersionKept]:
        """Those that can be read."""
        found: list[VersionKept] = []
        for message in await self._streams.read_all("versions"):
            with contextlib.suppress(DecodeError):
                found.append(_version(message))
        return found


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


def _version(message: Received) -> VersionKept:
    record = ev.PolicyVersionRecord.FromString(message.data)
    return VersionKept(message.id, record.version, record.stage)


def _version_field(message: Received) -> str:
    record = ev.PolicyVersionRecord.FromString(message.data)
    return f"{record.version}/{record.stage}"


def _evaluated_field(message: Received) -> str:
    return ev.EvaluatedGroup.FromString(message.data).group


def _batch_field(message: Received) -> str:
    return feed.batch_field(ev.BatchRecord.FromString(message.data))
