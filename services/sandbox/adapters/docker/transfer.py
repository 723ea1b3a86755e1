"""Which of an agent's files its verifier gets, and in what tar. Pure but for the files it is given.

Promise: nothing of the agent's is taken from, or written to, a folder that decides what code runs,
nor the tests nor the verdict: neither by name nor through a link, for every changed folder on the
way to a file travels as a folder, before the file, and replaces a link that the image has there.
Devices are left out, and what of `/` would steer a test runner. Links of the agent's that lead to
the verifier's own (native/links.py) are told, for the verifier to cut. Does not cover: reading and
writing containers (verifier.py).
"""

from __future__ import annotations

import tarfile
from typing import IO

from muster.types import Value
from services.sandbox.adapters import steering
from services.sandbox.adapters.docker.engine import Change
from services.sandbox.adapters.native import links

CHANGED, ADDED, GONE = 0, 1, 2
_CODE = frozenset({
    "usr", "bin", "sbin", "etc", "dev", "proc", "sys", "run", "tests", "logs", "boot", ".dockerenv",
    *steering.NAMES,
})  # fmt: skip
# Links in a running container's /dev, which the engine does not show.
_DEVICES = {"/dev/core": "/proc/kcore", "/dev/fd": "/proc/self/fd"} | {
    f"/dev/{name}": f"/proc/self/fd/{number}"
    for number, name in enumerate(("stdin", "stdout", "stderr"))
}
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


def copy(
    source: IO[bytes], path: str, target: tarfile.TarFile, wanted: frozenset[str]
) -> dict[str, str]:
    """Add the members of the engine's tar of `path` to `target`, by their whole names; path →
    target of the links among them.

    wanted: only these paths; empty for all. Raises tarfile.TarError for what is no tar.
    """
    parent = path.rpartition("/")[0]
    found: dict[str, str] = {}
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            full = f"{parent}/{member.name}".rstrip("/")
            if is_code(full) or ".." in full.split("/") or (wanted and full not in wanted):
                continue
            if member.isreg() or member.type in _CARRIED:
                content = archive.extractfile(member) if member.isreg() else None
                made = _renamed(member, full[1:], parent)
                target.addfile(made, content)
                if made.issym():
                    found[full] = made.linkname
                elif made.islnk() and f"/{made.linkname}" in found:
                    found[full] = found[f"/{made.linkname}"]
    return found


class Untold(Exception):
    """Whether there is a link at `path` is not known yet."""

    def __init__(self, path: str):
        self.path = path
        super().__init__(path)


class Links:
    """The agent's links (path → target), and what is known of other paths on their way."""

    def __init__(self, own: dict[str, str], there: frozenset[str]):
        """there: what the agent's files are, beside links; all else is the trusted state's."""
        self.own, self._there = own, there
        self._other: dict[str, str | None] = dict(_DEVICES)
        self._absent: set[str] = set()

    def tell(self, path: str, link: str | None, *, absent: bool = False) -> None:
        """What lies at a path of the trusted state; link: where it leads, if it is one."""
        self._other[path] = link
        if absent:
            self._absent.add(path)

    def is_snare(self, path: str) -> bool:
        """Whether an own link leads to what is the verifier's. Raises Untold."""
        return links.leads_there(path.rpartition("/")[0] or "/", self.own[path], self._read)

    def _read(self, path: str) -> str:
        if path in self.own:
            return self.own[path]
        if path not in self._other:
            if path not in self._there and path != "/" and not self._is_below_absent(path):
                raise Untold(path)
            self._other[path] = None
        link = self._other[path]
        if link is None:
            raise FileNotFoundError(path)
        return link

    def _is_below_absent(self, path: str) -> bool:
        above = path.rpartition("/")[0]
        while above:
            if above in self._absent:
                return True
            above = above.rpartition("/")[0]
        return False


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
