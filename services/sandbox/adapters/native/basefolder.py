"""Root file systems that boxes start from, below the keeper's stage.

Owns: one read-only mount for each base but `host` (rootfs.py builds that one), and what a root
file system must have to be one. Promise: nothing is ever written below a base; its mounts lie in
the keeper's own namespace and vanish with it; set-user-id bits and devices of it have no effect;
every path in it is looked up as a box sees it, so none of its links leads out of it.
Does not cover: where the folder comes from (basestore.py), layers above it (boxes.py).
Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat

from services.sandbox.adapters.native import syscalls as sc

NEEDED = ("/usr/bin/bash", "/usr/bin/env")
_FOLDER = "bases"  # below the stage
# What a box's own mounts and every command count on: made in the box's layer where a base has none.
_FURNITURE = {
    "dev": 0o755, "proc": 0o555, "run": 0o755, "tmp": 0o1777, "root": 0o700, "etc": 0o755,
    "logs": 0o755,
}  # fmt: skip
_LINKS_MAX = 40


class BaseFolders:
    """Of one keeper, whose current folder is the stage."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}
        self._made = 0

    def path(self, name: str, folder: str) -> str:
        """Where base `name`, which lies at `folder` on the host, is below the stage.

        Mounted at its first use, and anew when another folder has taken the place of the first:
        the cache of a host may be emptied while its keeper waits for a successor. Raises OSError
        that says what `folder` lacks.
        """
        target = self._paths.get(name)
        if target is None or not os.path.samestat(os.stat(folder), os.stat(target)):
            problem = trouble(folder)
            if problem:
                raise OSError(errno.EINVAL, f"base {name} at {folder}: {problem}")
            self._made += 1
            target = os.path.join(_FOLDER, str(self._made))
            os.makedirs(target)
            try:
                _mount(folder, target)
            except BaseException:
                os.rmdir(target)
                raise
            self._paths[name] = target
        return target


def _mount(folder: str, target: str) -> None:
    # The folder alone, not what happens to be mounted below it.
    sc.mount(folder, target, "", sc.MS_BIND)
    try:
        sc.make_tree_readonly(target)
    except BaseException:
        sc.unmount(target)
        raise


def furnish(base: str, upper: str) -> None:
    """Make in a box's fresh layer the folders that the root file system `base` lacks."""
    for name, mode in _FURNITURE.items():
        if not os.path.lexists(os.path.join(base, name)):
            path = os.path.join(upper, name)
            os.mkdir(path)
            os.chmod(path, mode)


def trouble(folder: str) -> str:
    """Why `folder` cannot be the root of a box, for people; empty when it can."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return error.strerror or str(error)
    try:
        for name in _FURNITURE:
            # The box's mounts are made at these names before the box is anybody's root: a link
            # there would lead out of it.
            if not _folder_or_absent(handle, name):
                return f"/{name} has to be a plain folder, or absent"
        missing = [path for path in NEEDED if not _executable(handle, path)]
    finally:
        os.close(handle)
    return f"it has no {' and no '.join(missing)}" if missing else ""


def _folder_or_absent(root: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True


def _executable(root: int, path: str) -> bool:
    """Whether `path` is a program, its links followed as if `root` were the root."""
    waiting = [part for part in path.split("/") if part]
    done: list[str] = []
    for _ in range(_LINKS_MAX * 8):
        if not waiting:
            break
        part = waiting.pop(0)
        if part == "..":
            done = done[:-1]
            continue
        if part == ".":
            continue
        here = "/".join([*done, part])
        try:
            mode = os.stat(here, dir_fd=root, follow_symlinks=False).st_mode
        except OSError:
            return False
        if not stat.S_ISLNK(mode):
            done.append(part)
            continue
        target = os.readlink(here, dir_fd=root)
        done = [] if target.startswith("/") else done
        waiting = [piece for piece in target.split("/") if piece] + waiting
    if waiting:
        return False  # links in a circle
    mode = os.stat("/".join(done) or ".", dir_fd=root, follow_symlinks=False).st_mode
    return stat.S_ISREG(mode) and bool(mode & 0o111)
