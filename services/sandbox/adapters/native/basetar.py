"""Unpacks the tarball of a root file system into a folder, trusting nothing in it.

Promise: nothing is written outside of the folder, whatever names and links the tarball holds:
every folder on the way is opened without following links; links are made, never gone through; a
hard link leads to a file that the tarball itself brought. No devices, FIFOs, set-user-id bits,
owners or extended attributes are taken over; all belongs to the user who unpacks. Bounded in files
and bytes before they are written. Does not cover: whose tarball it is (basestore.py).
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 20
_DEPTH_MAX = 128


class BadTarball(Exception):
    """What is wrong with it, for people."""


@dataclass(frozen=True)
class Bounds:
    """Most entries and most bytes of their contents."""

    files: int = 500_000
    size: int = 16 << 30


@dataclass
class Unpacked:
    """What came out; `skipped`: devices, FIFOs and such that were left out."""

    files: int = 0
    size: int = 0
    skipped: int = 0


def unpack(
    tarball: Path, folder: Path, bounds: Bounds, stopped: Callable[[], bool] = lambda: False
) -> Unpacked:
    """Unpack into the empty `folder`; `stopped` is asked between entries.

    Raises BadTarball, OSError when there is no room, and InterruptedError once stopped.
    """
    root = os.open(folder, _FOLDER)
    try:
        with tarfile.open(tarball, "r:*") as archive:
            return _unpack(archive, root, bounds, stopped)
    except (tarfile.TarError, EOFError, ValueError, LookupError, RecursionError) as error:
        raise BadTarball(f"cannot be read as a tarball: {error}") from error
    finally:
        os.close(root)


def _unpack(
    archive: tarfile.TarFile, root: int, bounds: Bounds, stopped: Callable[[], bool]
) -> Unpacked:
    done = Unpacked()
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # it would remember every entry
        if stopped():
            raise InterruptedError("stopped while a base was unpacked")
        if member.size < 0 or ((member.issym() or member.islnk()) and not member.linkname):
            raise BadTarball(f"an entry that makes no sense: {member.name[:200]!r}")
        done.files += 1
        done.size += member.size if member.isreg() else 0
        if done.files > bounds.files or done.size > bounds.size:
            raise BadTarball(f"over {bounds.files} entries or {bounds.size >> 20} MiB in all")
        _take(archive, root, member, done)
    return done


def _take(archive: tarfile.TarFile, root: int, member: tarfile.TarInfo, done: Unpacked) -> None:
    parts = _parts(member.name)
    if not parts:
        return  # the root itself
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        done.skipped += 1
        return
    parent = _enter(root, parts[:-1], member.name)
    try:
        if member.isdir():
            os.close(_folder(parent, parts[-1], member.name, member.mode & 0o1777))
            return
        _clear(parent, parts[-1], member.name)
        if member.issym():
            os.symlink(member.linkname, parts[-1], dir_fd=parent)
        elif member.islnk():
            _link(root, member, parent, parts[-1])
        else:
            _write(archive, member, parent, parts[-1])
    finally:
        os.close(parent)


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name or len(parts) > _DEPTH_MAX:
        raise BadTarball(f"an entry that leads out of the root, or too deep: {name[:200]!r}")
    return parts


def _enter(root: int, parts: list[str], name: str) -> int:
    """The folder below `root`, made where absent; links on the way are refused."""
    handle = os.dup(root)
    for part in parts:
        try:
            inner = _folder(handle, part, name, None)
        finally:
            os.close(handle)
        handle = inner
    return handle


def _folder(parent: int, part: str, name: str, mode: int | None) -> int:
    """A folder by its own name, made if absent; mode None leaves one that is there as it is."""
    try:
        os.mkdir(part, 0o755, dir_fd=parent)
    except FileExistsError:
        pass  # it is a folder, or the next line refuses it
    try:
        handle = os.open(part, _FOLDER, dir_fd=parent)
    except OSError as error:
        raise BadTarball(
            f"{name[:200]!r} lies below what is no folder ({error.strerror})"
        ) from None
    if mode is not None:
        os.fchmod(handle, mode)
    return handle


def _clear(parent: int, part: str, name: str) -> None:
    """A later entry replaces an earlier file or link of the same name."""
    try:
        os.unlink(part, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadTarball(f"{name[:200]!r} stands where a folder is ({error.strerror})") from None


def _link(root: int, member: tarfile.TarInfo, parent: int, part: str) -> None:
    target = _parts(member.linkname)
    if not target:
        raise BadTarball(f"{member.name[:200]!r} is a hard link to the root")
    folder = _enter(root, target[:-1], member.linkname)
    try:
        os.link(target[-1], part, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        raise BadTarball(
            f"{member.name[:200]!r} is a hard link to {member.linkname[:200]!r}: {error.strerror}"
        ) from None
    finally:
        os.close(folder)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, parent: int, part: str) -> None:
    source = archive.extractfile(member)
    assert source is not None  # it is a plain file
    handle = os.open(part, _NEW, 0o600, dir_fd=parent)
    with open(handle, "wb") as target, source:
        while data := source.read(_CHUNK):
            target.write(data)
        target.flush()
        os.fchmod(target.fileno(), stat.S_IMODE(member.mode) & 0o777)
        # Compiled Python files name the time of their source.
        os.utime(target.fileno(), (member.mtime, member.mtime))
