"""Everything a run has written, read once into plain carriers: from its server and from disk.

Owns: what is read and in which order. Promise: all streams are cut at one moment, so that no entry
is there without those it was written with; entries that were trimmed from the server come from the
history on disk, each once. Reading changes nothing. Report, audit and split work on a RunRecord
alone, so they need no server and no services. Does not cover: decoding (decode.py), token payloads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from muster.decode import decode
from muster.entries import Dead, Kept, Publication, RunRecord, StreamState
from muster.errors import HostUnfit, NotFound
from muster.stream_ids import id_order
from muster.streams import DEAD, STREAMS, Received, RunStreams, reaching_redis

__all__ = [
    "Publication",
    "RunRecord",
    "StreamState",
    "decode",
    "joined",
    "read_record",
    "runs",
    "trimmed",
]

_DEAD_MAX = 1000  # newest ones; their number is known anyway


async def read_record(client: Redis, run: str, history: Path | None = None) -> RunRecord:
    """Read all streams of `run`, and what was trimmed from them, when `history` has it.

    history: folder of the run's history, `state_dir/history/RUN`; without it, or when it is of
    another machine, a run with retired groups is read in part and says so (`RunRecord.whole`).
    Raises NotFound, naming the runs that are there, when nothing of it is; Unavailable; HostUnfit
    when the history cannot be unpacked here.
    """
    streams = RunStreams(client, run)
    cut = await _cut(client, streams)
    if not cut:
        raise NotFound(
            "there is nothing of that run",
            field="run",
            value=run,
            way_out=f"runs here: {', '.join(await runs(client)) or 'none'}; choose with --run",
        )
    before = await _counts(client, streams)
    live = [m for name in cut for m in await streams.read_all(name)]
    # What was trimmed while it was read is on disk by now, so disk comes last.
    on_disk = await asyncio.to_thread(trimmed, history, tuple(cut)) if history else []
    payloads = await _payloads(client, streams)
    after = await _counts(client, streams)
    dead = await _dead(client, streams)
    kept = Kept(before.totals, before.retired, after.retired, payloads, after.fenced)
    messages, states = joined(live, on_disk, cut)
    whole = not (after.retired and any(state.missing for state in states))
    return decode(run, messages, states, dead, kept, whole=whole)


async def runs(client: Redis) -> list[str]:
    """Names of the runs that have a stream here, at most a hundred of them."""
    found: set[str] = set()
    with reaching_redis():
        async for key in client.scan_iter(match="m:{*}:*", count=1000, _type="stream"):
            found.add(key.decode().partition("{")[2].partition("}")[0])
            if len(found) >= 100:
                break
    return sorted(found)


def joined(
    live: Sequence[Received], kept: Sequence[Received], cut: Mapping[str, StreamState]
) -> tuple[list[Received], list[StreamState]]:
    """Entries up to the cut, each once, every stream in its order; and where they lay."""
    found: dict[tuple[str, str], Received] = {}
    on_disk = dict.fromkeys(cut, 0)
    for message in live:
        found[message.stream, message.id] = message
    for message in kept:
        if (message.stream, message.id) not in found:
            found[message.stream, message.id] = message
            on_disk[message.stream] += 1
    until = {name: id_order(state.last) for name, state in cut.items()}
    messages = [m for m in found.values() if id_order(m.id) <= until[m.stream]]
    names = list(cut)
    messages.sort(key=lambda m: (names.index(m.stream), id_order(m.id)))
    counts = Counter(m.stream for m in messages)
    return messages, [
        replace(s, length=counts[name] - on_disk[name], on_disk=on_disk[name])
        for name, s in cut.items()
    ]


def trimmed(folder: Path, names: Sequence[str]) -> list[Received]:
    """The entries of these streams that a history on disk holds. Raises HostUnfit."""
    kept = [name for name in names if any(folder.glob(f"{name}.*"))]
    if not kept:
        return []
    try:
        from muster.history import History
    except ImportError as error:  # the base install reads servers only
        raise unpackable(error, field="state_dir", value=folder) from error
    history = History(folder)
    return [message for name in kept for message in history.read(name)]


def unpackable(error: ImportError, *, field: str, value: object) -> HostUnfit:
    """For the base install, which cannot unpack what `value` names."""
    return HostUnfit(
        f"part of this run lies compressed, which needs {error.name}",
        field=field,
        value=value,
        way_out='pip install "muster-rl[server]"',
    )


async def _cut(client: Redis, streams: RunStreams) -> dict[str, StreamState]:
    """The streams that there are, all as of one moment."""
    pipeline = client.pipeline(transaction=True)
    for name in STREAMS:
        pipeline.xinfo_stream(streams.key(name))
    with reaching_redis():
        answers = await pipeline.execute(raise_on_error=False)
    found = {}
    for name, info in zip(STREAMS, answers, strict=True):
        if isinstance(info, ResponseError):
            if "no such key" in str(info):
                continue
        if isinstance(info, Exception):
            with reaching_redis():
                raise info
        found[name] = _state(name, info)
    return found


def _state(name: str, info: Mapping[str, Any]) -> StreamState:
    return StreamState(
        name,
        int(info.get("entries-added", info["length"])),
        int(info["length"]),
        _text(info.get("max-deleted-entry-id", b"0-0")),
        last=_text(info["last-generated-id"]),
    )


async def _counts(client: Redis, streams: RunStreams) -> Kept:
    """Totals, bits of retired groups and refused writes, as of one moment."""
    names = await _names(client, streams, "totals:*")
    jobs = sorted(name.partition(":")[2] for name in names)
    roles = sorted(
        name.removeprefix("epoch:").removesuffix(":fenced")
        for name in await _names(client, streams, "epoch:*:fenced")
    )
    pipeline = client.pipeline(transaction=True)
    for job in jobs:
        pipeline.hgetall(streams.key("totals", job))
        pipeline.get(streams.key("retired", job))
    for role in roles:
        pipeline.get(streams.key("epoch", role, "fenced"))
    with reaching_redis():
        answers = await pipeline.execute()
    of_jobs, fenced = answers[: 2 * len(jobs)], answers[2 * len(jobs) :]
    return Kept(
        totals={
            job: {k.decode(): int(v) for k, v in of_jobs[2 * n].items()}
            for n, job in enumerate(jobs)
        },
        retired={job: _bits(of_jobs[2 * n + 1] or b"") for n, job in enumerate(jobs)},
        fenced={role: int(count or 0) for role, count in zip(roles, fenced, strict=True)},
    )


def _bits(data: bytes) -> frozenset[int]:
    """Positions of set bits, as SETBIT numbers them."""
    return frozenset(
        8 * at + bit for at, byte in enumerate(data) for bit in range(8) if byte & (128 >> bit)
    )


async def _payloads(client: Redis, streams: RunStreams) -> frozenset[str]:
    found = [*await _names(client, streams, "p:*"), *await _names(client, streams, "o:*")]
    return frozenset(found)


async def _names(client: Redis, streams: RunStreams, pattern: str) -> list[str]:
    """Keys of this run that fit, without the run's prefix."""
    prefix = streams.key("")
    with reaching_redis():
        return [
            key.decode().removeprefix(prefix)
            async for key in client.scan_iter(match=_literal(prefix) + pattern, count=5000)
        ]


def _literal(text: str) -> str:
    """Without the meaning that KEYS patterns give to these characters."""
    return "".join(f"\\{c}" if c in "*?[]\\^" else c for c in text)


async def _dead(client: Redis, streams: RunStreams) -> list[Dead]:
    page: Any
    with reaching_redis():
        page = await client.xrevrange(streams.key(DEAD), count=_DEAD_MAX)
    return [
        Dead(_text(at), *(_text(fields.get(name, b"")) for name in (b"stream", b"id", b"reason")))
        for at, fields in reversed(page)
    ]


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
