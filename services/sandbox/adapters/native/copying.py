"""Files into a box and out of it, on the side of its PID 1.

Owns: the parcel of one copy at a time. Promise: a copy is an errand (errand.py) with the agent's
rights, inside the box: no link is followed and no mount crossed, from the root down, however the
agent's processes change the tree meanwhile; so it reads and writes nothing that they could not,
nor anything outside of the folder named. What it cannot carry is refused by name.
Does not cover: one point in time: a file that is written meanwhile is copied as it is read.
Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from services.sandbox.adapters.native import errand, parcel
from services.sandbox.adapters.native import syscalls as sc
from services.sandbox.adapters.native.confine import Rules
from services.sandbox.adapters.native.parcel import Refused

HELD_MAX = 48 << 20  # bytes of one parcel
CHUNK = 2 << 20  # of a parcel in one frame
_CLOSED = sc.RESOLVE_NO_XDEV | sc.RESOLVE_NO_SYMLINKS | sc.RESOLVE_BENEATH
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS = {
    stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket",
}  # fmt: skip
# EINVAL: what was a link when it was looked at is none any more.
_CHANGED = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EINVAL, errno.ESTALE, errno.EAGAIN}


class Copies:
    """Serves `copy_data` and `copy_in`; `copy_out` and `copy_read`, in that order."""

    def __init__(self, rules: Rules):
        self._rules = rules
        self._copy, self._held = -1, -1  # whose parcel is held, and in what

    def serve(self, request: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        copy, op = int(request["copy"]), request["op"]
        if op == "copy_out" or (op == "copy_data" and request["first"]):
            self._begin(copy)
        if copy != self._copy:
            return {"error": "another copy of this box began meanwhile"}, b""
        if op == "copy_data":
            return self._take(blob), b""
        if op == "copy_read":
            return self._give(int(request["at"]))
        folder = str(request["path"])
        if op == "copy_in":
            held = self._held
            answer = errand.run(lambda: _write_all(folder, _content(held)), self._rules, held)
            self._end()
            return answer, b""
        bytes_max, held = int(request["bytes_max"]), self._held
        answer = errand.run(lambda: _Reader(held, bytes_max).read(folder), self._rules, held)
        if "ok" not in answer:
            self._end()
            return answer, b""
        return answer | {"size": os.fstat(held).st_size}, b""

    def _begin(self, copy: int) -> None:
        self._end()
        self._copy, self._held = copy, os.memfd_create("copy", os.MFD_CLOEXEC)

    def _end(self) -> None:
        if self._held >= 0:
            os.close(self._held)
        self._copy, self._held = -1, -1

    def _take(self, blob: bytes) -> dict[str, Any]:
        if os.fstat(self._held).st_size + len(blob) > HELD_MAX:
            self._end()
            return {"error": f"over {HELD_MAX} bytes"}
        _write(self._held, blob)
        return {"ok": True}

    def _give(self, at: int) -> tuple[dict[str, Any], bytes]:
        data = os.pread(self._held, CHUNK, at)
        if at + len(data) >= os.fstat(self._held).st_size:
            self._end()
        return {"ok": True}, data


def _enter(folder: int, part: str, path: str, flags: int = _FOLDER) -> int:
    """Open one name below `folder`, following nothing; `path` is told when that is not possible."""
    try:
        return sc.open_beneath(folder, part, flags, _CLOSED)
    except OSError as error:
        why = {
            errno.ENOENT: "is not there",
            errno.ELOOP: "is a link or lies behind one",
            errno.ENOTDIR: "is not a folder, or lies below what is none",
            errno.EXDEV: "lies on a mount of its own (/proc, /dev, the read-only /usr)",
            errno.ENXIO: "is a socket",
        }.get(error.errno or 0)
        if why is None:
            raise
        raise Refused(path, why) from None


def _write_all(folder: str, blob: bytes) -> None:
    """Open a parcel below `folder`, which is made if absent."""
    top = os.open("/", _FOLDER | os.O_CLOEXEC)
    for part in parcel.parts(folder):
        top = _made(top, part, folder)
    for path, kind, mode, link, data in parcel.read(blob, HELD_MAX):
        *parents, name = path.split("/")
        parent = os.dup(top)
        for part in parents:
            parent = _made(parent, part, path)
        try:
            _write_one(parent, name, (path, kind, mode, link, data))
        finally:
            os.close(parent)


def _made(parent: int, part: str, path: str) -> int:
    """The folder `part`, made if absent; `parent` is closed."""
    try:
        try:
            os.mkdir(part, 0o755, dir_fd=parent)
        except FileExistsError:
            pass  # a folder, or the next line refuses it
        return _enter(parent, part, path)
    finally:
        os.close(parent)


def _write_one(parent: int, name: str, item: parcel.Item) -> None:
    path, kind, mode, link, data = item
    if kind == "folder":
        handle = _made(os.dup(parent), name, path)
        os.fchmod(handle, mode)
        os.close(handle)
        return
    try:
        os.unlink(name, dir_fd=parent)  # whatever lies there: nothing is written through it
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        raise Refused(path, "is a folder in the box already") from None
    try:
        if kind == "link":
            os.symlink(link, name, dir_fd=parent)
            return
        handle = os.open(name, _NEW, 0o600, dir_fd=parent)
    except FileExistsError:
        raise Refused(path, "was made by a process of the box meanwhile") from None
    try:
        _write(handle, data)
        os.fchmod(handle, mode)
    finally:
        os.close(handle)


class _Reader:
    """Reads files below one path into a parcel; `held` is what it is written to."""

    def __init__(self, held: int, bytes_max: int):
        self._held, self._left = held, bytes_max
        self._bytes_max, self._items = bytes_max, 0

    def read(self, path: str) -> None:
        """The file or folder at `path`; names in the parcel begin with its last part."""
        parts = parcel.parts(path)
        if not parts:
            raise Refused(path, "is the whole box: name a folder in it")
        parent = os.open("/", _FOLDER | os.O_CLOEXEC)
        for part in parts[:-1]:
            inner = _enter(parent, part, path)
            os.close(parent)
            parent = inner
        self._one(parent, parts[-1], parts[-1], path)

    def _one(self, parent: int, name: str, path: str, shown: str) -> None:
        try:
            mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        except FileNotFoundError:
            raise Refused(shown, "is not there") from None
        if "/" not in path and stat.S_ISLNK(mode):
            raise Refused(shown, "is a link")
        try:
            if stat.S_ISLNK(mode):
                link = os.readlink(name, dir_fd=parent)
                parcel.check_link(shown, link, path.count("/") - 1)
                self._keep((path, "link", 0o777, link, b""))
            elif stat.S_ISDIR(mode):
                self._keep((path, "folder", mode & 0o777, "", b""))
                self._folder(_enter(parent, name, shown), path, shown)
            elif stat.S_ISREG(mode):
                self._file(_enter(parent, name, shown, _FILE), path, shown)
            else:
                raise Refused(shown, f"is a {_OTHERS.get(stat.S_IFMT(mode), 'special file')}")
        except OSError as error:
            if error.errno in _CHANGED:
                raise Refused(shown, "changed while it was copied") from None
            raise

    def _folder(self, handle: int, path: str, shown: str) -> None:
        try:
            if path.count("/") >= parcel.DEPTH_MAX - 1:
                raise Refused(shown, f"lies over {parcel.DEPTH_MAX} folders deep")
            for name in sorted(os.listdir(handle)):
                self._one(handle, name, f"{path}/{name}", f"{shown.rstrip('/')}/{name}")
        finally:
            os.close(handle)

    def _file(self, handle: int, path: str, shown: str) -> None:
        try:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                raise Refused(shown, "changed while it was copied")
            parts, size = [], 0
            while data := os.read(handle, CHUNK):
                size += len(data)
                if size > self._left:
                    raise Refused(shown, f"is more than {self._bytes_max} bytes with the rest")
                parts.append(data)
        finally:
            os.close(handle)
        self._left -= size
        self._keep((path, "file", facts.st_mode & 0o777, "", b"".join(parts)))

    def _keep(self, item: parcel.Item) -> None:
        self._items += 1
        if self._items > parcel.ITEMS_MAX:
            raise Refused(item[0], f"is over {parcel.ITEMS_MAX} items with the rest")
        parcel.check(item[0], item[1] if item[1] != "link" else "file", item[3])
        _write(self._held, parcel.write(item))


def _content(handle: int) -> bytes:
    return os.pread(handle, os.fstat(handle).st_size, 0)


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
