"""The raw layers of overlayfs: one laid over another, as plain files.

Owns: what a layer means (whiteouts, opaque folders) when layers are made one. Promise: boxes over
the result see what they would see over the layers it was made of; hard links within one layer,
holes, owners, times and extended attributes are kept; no name is ever followed and no path built,
however deep or strange the folders are; descriptors and memory do not grow with depth but for the
names that wait. Does not cover: who may write to a layer meanwhile: nobody (snapshots.py).
Standard library only; runs in a forked child of the keeper, as root.
"""

from __future__ import annotations

import errno
import os
import stat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPAQUE = "trusted.overlay.opaque"
# What overlayfs notes about where a file was copied up from: only true in the place of its making.
_OF_ITS_PLACE = {
    "trusted.overlay.origin",
    "trusted.overlay.impure",
    "trusted.overlay.nlink",
    "trusted.overlay.uuid",
}


def merge(sources: list[str], target: str, links: str) -> None:
    """Lay the layers at `sources`, the lowest first, into the empty folder `target`.

    links: an empty folder beside it, empty again afterwards, for hard links on the way.
    """
    for source in sources:
        _Apply(source, target, links).run()


def prune(layer: str, base: str) -> None:
    """Remove the whiteouts of a layer that cover nothing of the base it is to lie on.

    Not for room: in a folder that is in one layer alone overlayfs looks for none, and lists them.
    """
    here, below = os.open(layer, _FOLDER), os.open(base, _FOLDER)
    device = os.fstat(below).st_dev  # what is mounted in a base is not part of it, for overlayfs
    depth = found = 0  # of `here`, and of the folder of the base that is its like or a parent's
    waiting = [_folders(here, unlink_whiteouts=False)]
    while True:
        if waiting[-1]:
            name = waiting[-1].pop()
            here = step(here, name)
            if found == depth and not _marked_opaque(here) and _has_folder(below, name, device):
                below, found = step(below, name), found + 1
            depth += 1
            waiting.append(_folders(here, unlink_whiteouts=found != depth))
        elif depth:
            waiting.pop()
            here = step(here, "..")
            if found == depth:
                below, found = step(below, ".."), found - 1
            depth -= 1
        else:
            os.close(here)
            os.close(below)
            return


class _Apply:
    """One layer over what `target` holds already."""

    def __init__(self, source: str, target: str, links: str):
        self._source = os.open(source, _FOLDER)
        self._target = os.open(target, _FOLDER)
        self._links = os.open(links, _FOLDER)
        self._linked: set[str] = set()  # inodes with several names, kept by number in `links`

    def run(self) -> None:
        try:
            self._walk()
        finally:
            for name in self._linked:
                os.unlink(name, dir_fd=self._links)
            for handle in (self._source, self._target, self._links):
                os.close(handle)

    def _walk(self) -> None:
        """Every folder once, by way of `..`: neither side is changed by anybody else."""
        waiting = [self._entries()]
        while True:
            if waiting[-1]:
                self._move(waiting[-1].pop())
                waiting.append(self._entries())
                continue
            # After what is in it, which would change its times.
            _take_attributes(self._source, self._target, os.fstat(self._source), sticky=True)
            waiting.pop()
            if not waiting:
                return
            self._move("..")

    def _move(self, name: str) -> None:
        self._source = step(self._source, name)
        self._target = step(self._target, name)

    def _entries(self) -> list[str]:
        """Take over what is in this folder; its folders by name, made but empty or as they were."""
        folders = []
        for name in os.listdir(self._source):
            facts = os.stat(name, dir_fd=self._source, follow_symlinks=False)
            if stat.S_ISDIR(facts.st_mode):
                self._folder(name)
                folders.append(name)
            else:
                remove(self._target, name)
                self._other(name, facts)
        return folders

    def _folder(self, name: str) -> None:
        """A folder is merged with one below it, unless it is opaque; anything else ends there."""
        below = _mode(self._target, name)
        if below is not None and stat.S_ISDIR(below) and not self._is_opaque(name):
            return
        if below is not None:
            remove(self._target, name)
        os.mkdir(name, 0o700, dir_fd=self._target)
        if below is not None:
            handle = os.open(name, _FOLDER, dir_fd=self._target)
            try:
                os.setxattr(handle, _OPAQUE, b"y")
            finally:
                os.close(handle)

    def _is_opaque(self, name: str) -> bool:
        handle = os.open(name, _FOLDER, dir_fd=self._source)
        try:
            return _marked_opaque(handle)
        finally:
            os.close(handle)

    def _other(self, name: str, facts: os.stat_result) -> None:
        inode = str(facts.st_ino)
        if inode in self._linked:
            os.link(inode, name, src_dir_fd=self._links, dst_dir_fd=self._target,
                    follow_symlinks=False)  # fmt: skip
            return
        if stat.S_ISREG(facts.st_mode):
            self._file(name, facts)
        else:
            self._special(name, facts)
        if facts.st_nlink > 1:
            os.link(name, inode, src_dir_fd=self._target, dst_dir_fd=self._links,
                    follow_symlinks=False)  # fmt: skip
            self._linked.add(inode)

    def _file(self, name: str, facts: os.stat_result) -> None:
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        source = os.open(name, os.O_RDONLY | flags, dir_fd=self._source)
        try:
            fresh = os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags
            target = os.open(name, fresh, 0o600, dir_fd=self._target)
            try:
                _copy_data(source, target, facts.st_size)
                _take_attributes(source, target, facts)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _special(self, name: str, facts: os.stat_result) -> None:
        """A link, whiteout, FIFO or socket: made anew, its attributes set without opening it."""
        if stat.S_ISLNK(facts.st_mode):
            os.symlink(os.readlink(name, dir_fd=self._source), name, dir_fd=self._target)
        else:
            os.mknod(name, facts.st_mode, facts.st_rdev, dir_fd=self._target)
        if is_whiteout(facts):
            return
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        source = os.open(name, flags, dir_fd=self._source)
        target = os.open(name, flags, dir_fd=self._target)
        try:
            os.chown(name, facts.st_uid, facts.st_gid, dir_fd=self._target, follow_symlinks=False)
            if not stat.S_ISLNK(facts.st_mode):
                os.chmod(name, stat.S_IMODE(facts.st_mode), dir_fd=self._target)  # ours, no link
            # The calls for extended attributes take no O_PATH descriptor, but its name here.
            _take_xattrs(f"/proc/self/fd/{source}", f"/proc/self/fd/{target}")
        finally:
            os.close(source)
            os.close(target)
        times = (facts.st_atime_ns, facts.st_mtime_ns)
        os.utime(name, ns=times, dir_fd=self._target, follow_symlinks=False)


def is_whiteout(facts: os.stat_result) -> bool:
    """Whether it says that a layer below has nothing of this name."""
    return stat.S_ISCHR(facts.st_mode) and facts.st_rdev == 0


def _marked_opaque(folder: int) -> bool:
    return _OPAQUE in os.listxattr(folder) and os.getxattr(folder, _OPAQUE) == b"y"


def _has_folder(folder: int, name: str, device: int) -> bool:
    try:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_dev == device


def _folders(folder: int, *, unlink_whiteouts: bool) -> list[str]:
    """The folders in one; with `unlink_whiteouts` its whiteouts go, and its times stay."""
    before = os.fstat(folder)
    folders = []
    for name in os.listdir(folder):
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(facts.st_mode):
            folders.append(name)
        elif unlink_whiteouts and is_whiteout(facts):
            os.unlink(name, dir_fd=folder)
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    return folders


def _mode(folder: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _take_attributes(
    source: int, target: int, facts: os.stat_result, *, sticky: bool = False
) -> None:
    """Owner, mode, extended attributes and times, in the order in which none undoes another."""
    os.fchown(target, facts.st_uid, facts.st_gid)
    os.fchmod(target, stat.S_IMODE(facts.st_mode))
    _take_xattrs(source, target, sticky=sticky)
    os.utime(target, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _take_xattrs(source: int | str, target: int | str, *, sticky: bool = False) -> None:
    """Those of `source` alone; with `sticky` an opaque target stays so."""
    wanted = set(os.listxattr(source)) - _OF_ITS_PLACE
    there = set(os.listxattr(target))
    kept = there & {_OPAQUE} if sticky else set()
    for name in there - wanted - kept:
        os.removexattr(target, name)
    for name in wanted - kept:
        os.setxattr(target, name, os.getxattr(source, name))


def _copy_data(source: int, target: int, size: int) -> None:
    """What was written, where it was written; the rest stays a hole."""
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # only a hole is left
        end = os.lseek(source, at, os.SEEK_HOLE)
        os.lseek(target, at, os.SEEK_SET)
        while at < end:
            sent = os.sendfile(target, source, at, end - at)
            if not sent:
                raise OSError(errno.EIO, "a file became shorter while it was copied")
            at += sent
    os.ftruncate(target, size)


def remove(folder: int, name: str) -> None:
    """Remove `name` in the folder behind a descriptor, with all below it; absent is fine."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        _empty(os.open(name, _FOLDER, dir_fd=folder))
        os.rmdir(name, dir_fd=folder)


def _empty(here: int) -> None:
    """Remove all below the folder behind `here`, which is closed."""
    path: list[str] = []
    waiting = [_unlink_files(here)]
    while True:
        if waiting[-1]:
            path.append(waiting[-1].pop())
            here = step(here, path[-1])
            waiting.append(_unlink_files(here))
        elif path:
            waiting.pop()
            here = step(here, "..")
            os.rmdir(path.pop(), dir_fd=here)
        else:
            os.close(here)
            return


def step(folder: int, name: str) -> int:
    """The folder `name` in `folder`, which is closed; no link is followed."""
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    finally:
        os.close(folder)


def _unlink_files(folder: int) -> list[str]:
    """Unlink all but folders, whose names are returned."""
    folders = []
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            folders.append(name)
    return folders
