"""Files into a container and out of it, by the engine's archive calls.

Promise: the container's processes stand still meanwhile, so that what was looked at is what is
copied; no link on the way is followed; what a copy must not hold is InvalidInput, told by name.
Does not cover: how many bytes a caller may ask for (the configuration's copy_bytes_max).
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.sandbox.adapters.copyrules import refuse
from services.sandbox.adapters.docker.engine import Engine, PathStat
from services.sandbox.adapters.docker.steps import Place, disk
from services.sandbox.adapters.native import parcel
from services.sandbox.adapters.native.parcel import Refused
from services.sandbox.box import BoxFailure, CopiedFile

_FRAMING = 8 << 20  # bytes of a tar beside the files' own
_SPECIAL = {tarfile.CHRTYPE: "device", tarfile.BLKTYPE: "device", tarfile.FIFOTYPE: "FIFO"}


async def copy_in(place: Place, folder: str, files: tuple[CopiedFile, ...]) -> None:
    """Write `files` below `folder`. Raises InvalidInput for what is not carried, BoxFailure."""
    try:
        for file in files:
            parcel.check(file.path, file.kind, file.link)
        if len(files) > parcel.ITEMS_MAX:
            raise Refused(files[0].path, f"is one of over {parcel.ITEMS_MAX} items")
        async with _still(place):
            await _check_room(place, files)
            way = _Way(place)
            top = await way.folder(folder)
            for file in files:
                await way.free(f"{top}/{file.path}", file)
            await place.engine.put(
                place.container, "/", await asyncio.to_thread(_packed, top, files)
            )
    except Refused as refusal:
        refuse(refusal.path, refusal.why)


async def copy_out(place: Place, path: str, bytes_max: int) -> tuple[CopiedFile, ...]:
    """The file or folder at `path`; names begin with its last part. Raises InvalidInput."""
    try:
        async with _still(place):
            whole = "/".join(("", *parcel.parts(path)))
            if not whole:
                raise Refused(path, "is the whole box: name a folder in it")
            await _Way(place).folder(posixpath.dirname(whole), make=False)
            found = await place.engine.stat(place.container, whole)
            _check_top(path, found)
            sink = io.BytesIO()
            cut = not await place.engine.archive(
                place.container, whole, 2 * bytes_max + _FRAMING, sink
            )
            if cut:
                raise Refused(path, f"is more than {bytes_max} bytes")
            sink.seek(0)
            files = await asyncio.to_thread(_unpacked, sink, whole, bytes_max)
            await _check_sockets(place.engine, place.container, whole, files)
            return files
    except Refused as refusal:
        refuse(refusal.path, refusal.why)
    except tarfile.TarError as error:
        raise BoxFailure(f"the engine's tar of {path} cannot be read: {error}") from error


@asynccontextmanager
async def _still(place: Place) -> AsyncIterator[None]:
    await place.engine.pause(place.container)
    try:
        yield
    finally:
        await place.engine.unpause(place.container)


async def _check_room(place: Place, files: tuple[CopiedFile, ...]) -> None:
    if await disk(place) + sum(len(f.data) for f in files) > place.limits.disk_bytes:
        raise Refused(files[0].path, "does not fit into the box's disk limit")


class _Way:
    """The folders on the way to what is copied, each looked at once."""

    def __init__(self, place: Place):
        self._place = place
        self._seen: dict[str, PathStat | None] = {}

    async def folder(self, path: str, *, make: bool = True) -> str:
        """The plain form of a path all of whose parts are folders, or absent if `make`."""
        at = ""
        for part in parcel.parts(path):
            at += f"/{part}"
            found = await self._stat(at)
            if found is None and not make:
                raise Refused(path, "is not there")
            if found is not None and found.kind != "folder":
                why = "is a link or lies behind one" if found.kind == "link" else "is no folder"
                raise Refused(path, why)
        return at

    async def free(self, path: str, file: CopiedFile) -> None:
        """Raises Refused where the item cannot be written."""
        await self.folder(posixpath.dirname(path))
        found = await self._stat(path)
        if found and file.kind != "folder" and found.kind == "folder":
            raise Refused(file.path, "is a folder in the box already")
        if found and file.kind == "folder" and found.kind != "folder":
            raise Refused(file.path, "is a link or lies behind one")

    async def _stat(self, path: str) -> PathStat | None:
        if path not in self._seen:
            self._seen[path] = await self._place.engine.stat(self._place.container, path)
        return self._seen[path]


def _packed(top: str, files: tuple[CopiedFile, ...]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for file in files:
            info = tarfile.TarInfo(f"{top}/{file.path}".lstrip("/"))
            info.mode = file.mode & 0o777
            if file.kind == "link":
                info.type, info.linkname = tarfile.SYMTYPE, file.link
            elif file.kind == "folder":
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(file.data)
            archive.addfile(info, io.BytesIO(file.data))
    return sink.getvalue()


def _check_top(path: str, found: PathStat | None) -> None:
    if found is None:
        raise Refused(path, "is not there")
    if found.kind == "link":
        raise Refused(path, "is a link")


def _unpacked(source: io.BytesIO, whole: str, bytes_max: int) -> tuple[CopiedFile, ...]:
    """The engine's tar as files. Raises Refused."""
    files: list[CopiedFile] = []
    held: dict[str, bytes] = {}
    parent, left = posixpath.dirname(whole), bytes_max
    with tarfile.open(fileobj=source) as archive:
        for member in archive:
            name, shown = member.name.rstrip("/"), f"{parent}/{member.name}"
            if member.type in _SPECIAL:
                raise Refused(shown, f"is a {_SPECIAL[member.type]}")
            if member.issym():
                parcel.check_link(shown, member.linkname, name.count("/") - 1)
                files.append(CopiedFile(name, "link", 0o777, b"", member.linkname))
                continue
            if member.isdir():
                files.append(CopiedFile(name, "folder", member.mode & 0o777))
                continue
            content = archive.extractfile(member) if member.isreg() else None
            data = content.read(left + 1) if content else held.get(member.linkname, b"")
            left -= len(data)
            if left < 0:
                raise Refused(shown, f"is more than {bytes_max} bytes with the rest")
            held[member.name] = data
            files.append(CopiedFile(name, "file", member.mode & 0o777, data))
            if len(files) > parcel.ITEMS_MAX:
                raise Refused(shown, f"is over {parcel.ITEMS_MAX} items with the rest")
    for file in files:
        parcel.check(file.path, file.kind if file.kind != "link" else "file", file.link)
    return tuple(files)


async def _check_sockets(
    engine: Engine, container: str, whole: str, files: tuple[CopiedFile, ...]
) -> None:
    """The engine leaves sockets out of its tar in silence: what it left out is looked at."""
    parent = posixpath.dirname(whole).rstrip("/")
    there = {f"{parent}/{file.path}" for file in files}
    for change in await engine.changes(container):
        inside = change.path == whole or change.path.startswith(f"{whole}/")
        if inside and change.kind != 2 and change.path not in there:
            found = await engine.stat(container, change.path)
            if found is not None:
                raise Refused(change.path, "is a socket")
