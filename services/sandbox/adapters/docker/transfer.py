"""Which of an agent's files its verifier gets, and in what tar. Pure but for the files it is given.

Promise: nothing of the agent's is taken from, or written to, a folder that decides what code runs,
nor the tests nor the verdict: neither by name nor through a link, for every changed folder on the
way to a file travels as a folder, before the file, and replaces a link that the image has there.
Devices are left out. Does not cover: reading and writing containers (verifier.py).
"""

from __future__ import annotations

import tarfile
from typing import IO

from muster.types import Value
from services.sandbox.adapters.docker.engine import Change

CHANGED, ADDED, GONE = 0, 1, 2
_CODE = frozenset({
    "usr", "bin", "sbin", "etc", "dev", "proc", "sys", "run", "tests", "logs", "boot", ".dockerenv",
})  # fmt: skip
_CARRIED = (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)
_ONE_BY_ONE = 24  # paths; more than that, and whole top-level folders are read and sifted


class Carried(Value, frozen=True):
    """What differs from a trusted state: paths as they are now, sorted, and paths to remove first.

    A path can be in both: it was removed and made anew.
    """

    there: tuple[Change, ...] = ()
    gone: tuple[str, ...] = ()


class Plan(Value, frozen=True):
    """What to read from the agent's container, in this order, and what to remove from the other.

    folders: only themselves. trees: files, or folders with all that is in them. sifted: top-level
    folders of which only `wanted` travels.
    """

    folders: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    sifted: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    wanted: frozenset[str] = frozenset()


def is_code(path: str) -> bool:
    """Whether a path belongs to what the verifier takes from the trusted state alone."""
    top = path.strip("/").partition("/")[0]
    return not top or top in _CODE or top.startswith("lib")


def merged(below: Carried, changes: list[Change]) -> Carried:
    """What differs from the trusted state, when `changes` came on top of `below`."""
    kinds = {change.path: change.kind for change in below.there}
    gone = set(below.gone)
    for change in changes:
        if change.kind != GONE:
            before = kinds.get(change.path, change.kind)
            kinds[change.path] = ADDED if ADDED in (before, change.kind) else CHANGED
            continue
        gone.add(change.path)
        for path in [p for p in kinds if p == change.path or p.startswith(change.path + "/")]:
            del kinds[path]
    there = tuple(Change(path, kinds[path]) for path in sorted(kinds))
    return Carried(there, tuple(sorted(gone)))


def plan(carried: Carried) -> Plan:
    """How to carry it over."""
    ours = [change for change in carried.there if not is_code(change.path)]
    gone = tuple(path for path in carried.gone if not is_code(path))
    parents = {change.path.rpartition("/")[0] for change in ours}
    folders, trees, added = [], [], ""
    for change in ours:
        if added and change.path.startswith(added):
            continue
        if change.kind == CHANGED and change.path in parents:
            folders.append(change.path)
            continue
        trees.append(change.path)
        if change.kind == ADDED:
            added = change.path + "/"
    if len(folders) + len(trees) <= _ONE_BY_ONE:
        return Plan(tuple(folders), tuple(trees), gone=gone)
    tops = {"/" + path[1:].partition("/")[0] for path in (*folders, *trees)}
    wanted = frozenset(change.path for change in ours)
    return Plan(sifted=tuple(sorted(tops)), gone=gone, wanted=wanted)


def copy(source: IO[bytes], path: str, target: tarfile.TarFile, wanted: frozenset[str]) -> None:
    """Add the members of the engine's tar of `path` to `target`, by their whole names.

    wanted: only these paths; empty for all. Raises tarfile.TarError for what is no tar.
    """
    parent = path.rpartition("/")[0]
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            full = f"{parent}/{member.name}".rstrip("/")
            if is_code(full) or ".." in full.split("/") or (wanted and full not in wanted):
                continue
            if member.isreg() or member.type in _CARRIED:
                content = archive.extractfile(member) if member.isreg() else None
                target.addfile(_renamed(member, full[1:], parent), content)


def _renamed(member: tarfile.TarInfo, name: str, parent: str) -> tarfile.TarInfo:
    """A member of our own making: what came along in extended headers would count over its name."""
    made = tarfile.TarInfo(name)
    made.type, made.mode, made.mtime = member.type, member.mode, int(member.mtime)
    made.uid, made.gid = member.uid, member.gid
    made.size = member.size if member.isreg() else 0
    if member.issym():
        made.linkname = member.linkname
    elif member.islnk():
        made.linkname = f"{parent}/{member.linkname}"[1:]
    return made
