"""Copies into and out of a box, on the side of the service: parcels over a box's channel.

Promise: what a copy must not hold is InvalidInput, told by name, before anything is sent or after
anything is taken; what comes from a box is checked again here. Copies of one box take turns.
BoxFailure is the host's trouble.
Does not cover: how many bytes a caller may ask for (the configuration's copy_bytes_max).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from services.sandbox.adapters.copyrules import refuse
from services.sandbox.adapters.native import parcel
from services.sandbox.adapters.native.channel import Channel
from services.sandbox.adapters.native.copying import CHUNK, HELD_MAX
from services.sandbox.box import BoxFailure, CopiedFile

_WAIT_S = 20.0  # longer than PID 1 gives a copy
_TURN_S = 60.0
_numbers = itertools.count()
_turns: WeakKeyDictionary[Channel, asyncio.Lock] = WeakKeyDictionary()


async def copy_in(channel: Channel, folder: str, files: tuple[CopiedFile, ...]) -> None:
    """Write `files` below `folder`. Raises InvalidInput for what is not carried, BoxFailure."""
    blob = _packed(files)
    async with _turn(channel) as copy:
        for at in range(0, max(len(blob), 1), CHUNK):
            request = {"op": "copy_data", "copy": copy, "first": at == 0}
            await _ask(channel, request, blob[at : at + CHUNK])
        await _ask(channel, {"op": "copy_in", "copy": copy, "path": folder})


async def copy_out(channel: Channel, path: str, bytes_max: int) -> tuple[CopiedFile, ...]:
    """The file or folder at `path`; names begin with its last part. Raises InvalidInput."""
    blob = bytearray()
    async with _turn(channel) as copy:
        request = {"op": "copy_out", "copy": copy, "path": path, "bytes_max": bytes_max}
        size = int((await _ask(channel, request))[0].get("size", 0))
        while len(blob) < min(size, HELD_MAX):
            part = (await _ask(channel, {"op": "copy_read", "copy": copy, "at": len(blob)}))[1]
            if not part:
                break
            blob += part
    try:
        return tuple(
            CopiedFile(name, kind, mode, data, link)
            for name, kind, mode, link, data in parcel.read(bytes(blob), bytes_max)
        )
    except parcel.Refused as refusal:
        refuse(refusal.path, refusal.why)
    except ValueError as error:
        raise BoxFailure(f"PID 1 of the box answered nonsense: {error}") from error


@asynccontextmanager
async def _turn(channel: Channel) -> AsyncIterator[int]:
    """PID 1 holds the parcel of one copy at a time; yields this copy's number."""
    lock = _turns.setdefault(channel, asyncio.Lock())
    try:
        async with asyncio.timeout(_TURN_S):
            await lock.acquire()
    except TimeoutError:
        raise BoxFailure(f"another copy of the box took over {_TURN_S:g} s") from None
    try:
        yield next(_numbers)
    finally:
        lock.release()


def _packed(files: tuple[CopiedFile, ...]) -> bytes:
    try:
        for file in files:
            parcel.check(file.path, file.kind, file.link)
        if len(files) > parcel.ITEMS_MAX:
            refuse(files[0].path, f"is one of over {parcel.ITEMS_MAX} items")
        blob = b"".join(
            parcel.write(
                (f.path, f.kind, f.mode & 0o777, f.link, f.data if f.kind == "file" else b"")
            )
            for f in files
        )
    except parcel.Refused as refusal:
        refuse(refusal.path, refusal.why)
    if len(blob) > HELD_MAX:
        refuse(files[0].path, f"is part of a copy of over {HELD_MAX} bytes")
    return blob


async def _ask(
    channel: Channel, request: dict[str, Any], blob: bytes = b""
) -> tuple[dict[str, Any], bytes]:
    answer, data = await channel.call(request, blob, wait_s=_WAIT_S)
    if "refused" in answer:
        refuse(str(answer.get("path", ""))[:500], str(answer["refused"])[:500])
    if "error" in answer:
        raise BoxFailure(str(answer["error"])[:2000])
    return answer, data
