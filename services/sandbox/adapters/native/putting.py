"""Files of a task's author, and the folders that it works in, put into a box by its PID 1.

Promise: the set-up's commands run in the box before, so its links are nobody's to trust: every path
is resolved by the kernel as in the box, by an errand (errand.py) with the agent's rights. A link to
a folder of the box is followed, as an image builder does; the links that /proc makes of descriptors
and roots are not. What cannot be carried out is refused by name. Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from services.sandbox.adapters.native import errand
from services.sandbox.adapters.native import syscalls as sc
from services.sandbox.adapters.native.confine import Rules
from services.sandbox.adapters.native.parcel import Refused

_ROOT = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
# What the box's own files make of a path; any other error is the host's.
_WHY = {
    errno.ELOOP: "leads through a link of /proc, or in a circle",
    errno.ENOTDIR: "lies below what is no folder",
    errno.EISDIR: "is a folder already",
    errno.ENOENT: "leads through a link to nothing",
    errno.EROFS: "lies where the box cannot write (/usr of the host, /proc)",
    errno.EACCES: "lies where the box cannot write",
    errno.EPERM: "lies where the box cannot write",
    errno.ETXTBSY: "is a program that runs",
    errno.ENXIO: "is a FIFO, a socket or a device",
    errno.ENAMETOOLONG: "is too long a path",
    errno.EXDEV: "leads out of the box",
    errno.EAGAIN: "was changed meanwhile",
}


def put(request: dict[str, Any], blob: bytes, rules: Rules) -> dict[str, Any]:
    """Write the files that `request` lists as [path, mode, size] and whose bytes `blob` is."""

    def work() -> None:
        root, at = os.open("/", _ROOT), 0
        for path, mode, size in request["files"]:
            _write(root, str(path), int(mode), blob[at : at + size])
            at += size

    return errand.run(work, rules)


def make_folder(path: str, rules: Rules) -> dict[str, Any]:
    """Make a folder and its parents, where they are absent."""
    return errand.run(lambda: _made(os.open("/", _ROOT), path), rules)


def _write(root: int, path: str, mode: int, data: bytes) -> None:
    _made(root, os.path.dirname(path))
    try:
        handle = sc.open_in_root(root, path, _FILE, 0o600)
    except OSError as error:
        raise _refusal(path, error) from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Refused(path, _WHY[errno.ENXIO])
        os.ftruncate(handle, 0)
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        os.fchmod(handle, mode)
    finally:
        os.close(handle)


def _made(root: int, path: str) -> None:
    whole = "/"
    for part in [part for part in path.split("/") if part not in ("", ".")]:
        above, whole = whole, os.path.join(whole, part)
        try:
            os.close(_open(root, above, part, whole))
        except OSError as error:
            raise _refusal(path, error) from None


def _open(root: int, above: str, part: str, whole: str) -> int:
    try:
        return sc.open_in_root(root, whole, _ROOT)
    except FileNotFoundError:
        parent = sc.open_in_root(root, above, _ROOT)
        try:
            os.mkdir(part, 0o755, dir_fd=parent)
        except FileExistsError:
            pass  # a link to nothing, as the next line finds; or it has just been made
        finally:
            os.close(parent)
        return sc.open_in_root(root, whole, _ROOT)


def _refusal(path: str, error: OSError) -> Exception:
    why = _WHY.get(error.errno or 0)
    return Refused(path, why) if why else error
