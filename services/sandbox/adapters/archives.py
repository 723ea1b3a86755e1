"""Tar archives that go into a box or come out of one, read and written in memory.

Promise: nothing of an archive names a place outside of its own folder: absolute paths, `..`, links
that leave it, devices, FIFOs and sockets are refused by name; sizes and counts are bounded before
anything is read. What comes out of a box is held to the same rules. Does not cover: reading and
writing within the box (the backend).
"""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Iterable

from muster.errors import InvalidInput
from services.sandbox.box import CopiedFile

ENTRIES_MAX = 4096
PATH_BYTES_MAX = 1024
_HEADERS = 2048  # bytes an entry, beside its content
_KINDS = {tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "link"}


def read(archive: bytes, bytes_max: int) -> tuple[CopiedFile, ...]:
    """The entries of an uncompressed tar; InvalidInput (field `archive`) names the one refused.

    A hard link becomes a copy of the file that it names, which has to come before it.
    """
    if len(archive) > bytes_max + ENTRIES_MAX * _HEADERS:
        raise _refusal("is too large", f"{len(archive)} bytes", f"copy at most {bytes_max} bytes")
    found: dict[str, CopiedFile] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            for info in tar:
                if info.isdir() and info.name.rstrip("/") == ".":
                    continue  # the folder itself, as `tar -c .` has it
                entry = _entry(tar, info, found)
                total += len(entry.data)
                if total > bytes_max or len(found) >= ENTRIES_MAX:
                    most = f"copy at most {bytes_max} bytes in {ENTRIES_MAX} files"
                    raise _refusal("holds too much", entry.path, most)
                found[entry.path] = entry
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
        raise _refusal(f"is no readable tar: {error}", "", "send an uncompressed tar") from error
    return checked(found.values(), field="archive")


def write(files: Iterable[CopiedFile]) -> bytes:
    """The same files as an uncompressed tar, folders before what is in them.

    InvalidInput (field `path`) for what `read` would refuse.
    """
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in sorted(checked(files, field="path"), key=lambda one: one.path):
            info = tarfile.TarInfo(file.path)
            info.mode = file.mode & 0o777
            if file.kind == "folder":
                info.type = tarfile.DIRTYPE
            elif file.kind == "link":
                info.type, info.linkname = tarfile.SYMTYPE, file.link
            else:
                info.size = len(file.data)
            tar.addfile(info, io.BytesIO(file.data) if file.kind == "file" else None)
    return sink.getvalue()


def checked(files: Iterable[CopiedFile], field: str) -> tuple[CopiedFile, ...]:
    """The same files; InvalidInput for a path or link that leaves the folder, and for one that
    lies where a file or link is."""
    found = {file.path: file for file in files}
    for path, file in found.items():
        _check_path(path, field)
        if file.kind == "link":
            _check_link(file, field)
        parents = path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            parent = found.get("/".join(parents[:depth]))
            if parent is not None and parent.kind != "folder":
                raise _refusal("has something below what is no folder", path, _PLAIN, field)
    return tuple(found.values())


_PLAIN = "copy plain files, folders and links that stay inside"


def _entry(tar: tarfile.TarFile, info: tarfile.TarInfo, found: dict[str, CopiedFile]) -> CopiedFile:
    path = posixpath.normpath(info.name) if info.name.rstrip("/") else info.name
    _check_path(info.name.removeprefix("./").rstrip("/") or ".", "archive")
    if info.islnk():
        named = found.get(posixpath.normpath(info.linkname))
        if named is None or named.kind != "file":
            raise _refusal("has a hard link to what does not come before it", info.name, _PLAIN)
        return CopiedFile(path, "file", named.mode, named.data)
    if info.isdir() or info.issym():
        kind = _KINDS[info.type]
        return CopiedFile(path, kind, info.mode & 0o777, link=info.linkname if info.issym() else "")
    if not info.isreg() or info.issparse():
        raise _refusal("holds a device, a FIFO or another special file", info.name, _PLAIN)
    source = tar.extractfile(info)
    data = source.read(info.size) if source else b""
    if len(data) != info.size:
        raise _refusal("is cut short", info.name, "send it whole")
    return CopiedFile(path, "file", info.mode & 0o777, data)


def _check_path(path: str, field: str) -> None:
    parts = path.split("/")
    bad = path != "." and any(part in ("", ".", "..") for part in parts)
    try:
        long = len(path.encode()) > PATH_BYTES_MAX
    except UnicodeEncodeError:
        bad, long = True, False
    if bad or long or "\0" in path:
        way_out = f"use relative paths of at most {PATH_BYTES_MAX} bytes without '..'"
        raise _refusal("has a path that cannot be used", path, way_out, field)


def _check_link(file: CopiedFile, field: str) -> None:
    """`..` only at the head of a link, where it is meant from a real folder: further on it could
    follow another link, and leave."""
    parts = [part for part in file.link.split("/") if part not in ("", ".")]
    ups = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    outside = ups > file.path.count("/") or ".." in parts[ups:]
    if outside or file.link.startswith("/") or not file.link or "\0" in file.link:
        raise _refusal("has a link that leaves it", f"{file.path} -> {file.link}", _PLAIN, field)


def _refusal(problem: str, value: str, way_out: str, field: str = "archive") -> InvalidInput:
    return InvalidInput(
        f"the copy {problem}", field=field, value=ascii(value)[1:-1][:200], way_out=way_out
    )
