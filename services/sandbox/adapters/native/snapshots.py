"""What boxes start from beside a base: snapshots, made and kept by the keeper.

Owns: one small file system for each snapshot below the stage, what lies on what, and the forked
children that copy. Promise: a snapshot never changes; nothing that a box or another snapshot lies
on is removed; copying never holds up the keeper: it is told `None`, to be asked again; a box that
is copied is stopped only as long as that takes, and goes on whatever fails. Does not cover: boxes
(boxes.py), what layers mean (layers.py). Standard library only.
"""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.sandbox.adapters.native import layers
from services.sandbox.adapters.native import syscalls as sc
from services.sandbox.adapters.native.cgroups import BoxGroups

EXISTS = "exists already"
_FOLDER = "l"  # short, since every box names all of its layers in one page of mount options
_QUIET = sc.MS_NOSUID | sc.MS_NODEV
_FREEZE_WAIT_S = 5.0  # processes stop in milliseconds, unless the kernel waits for a disk
_PATIENCE_S = 0.005  # how long one request may wait for a copy to end
_SLACK = 1 << 20


@dataclass(frozen=True)
class Chain:
    """Raw layers above a base, the top first.

    trusted: those of set-ups, which no agent could write; what a verifier's tools come from.
    held: the folders of the snapshots that all of these lie in.
    """

    lowers: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()
    held: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Below:
    """What a box lies on: a base (its name, its folder below the stage), a chain, and the most
    bytes of its own (0: any)."""

    base: str
    root: str
    chain: Chain
    size_max: int


@dataclass(frozen=True)
class Kept:
    """One snapshot; `base` and `root` as of the boxes below it, `size` in bytes."""

    name: str
    folder: str
    base: str
    root: str
    chain: Chain
    size: int

    def told(self) -> dict[str, int]:
        return {"size": self.size, "depth": len(self.chain.lowers)}


@dataclass(frozen=True)
class _Work:
    """For a forked child: lay `sources` over one another, the lowest first.

    root: the base that the result is to lie on, where it lies on nothing else. groups: of a box
    that stands still meanwhile.
    """

    sources: list[str]
    root: str = ""
    groups: BoxGroups | None = None


@dataclass
class _Copy:
    """A snapshot in the making by a forked child; `box` is what it was asked of."""

    kept: Kept
    box: str
    pid: int
    told: int  # a pipe: what went wrong
    groups: BoxGroups | None  # to be let go on


class Snapshots:
    """Of one keeper, whose current folder is the stage."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}
        self._copies: dict[str, _Copy] = {}
        self._orphans: set[str] = set()  # whose service is gone, until another claims them
        self._made = 0

    def chain(self, layer: str, base: str) -> Chain:
        """What a box from `layer` (none: empty) over `base` starts from. Raises OSError."""
        if not layer:
            return Chain()
        found = self.known(layer)
        if found.base != base:
            raise OSError(errno.EINVAL, f"snapshot {layer} lies on base {found.base}, not {base}")
        return found.chain

    def known(self, layer: str) -> Kept:
        if layer not in self._kept:
            raise OSError(errno.ENOENT, f"there is no snapshot {layer}")
        return self._kept[layer]

    def adopt(self, layer: str, box_folder: str, below: Below) -> Kept:
        """The file system of an ended box, mounted at `box_folder`, becomes a snapshot.

        It is trusted if all below it is: what an agent leaves is kept by `copy`.
        """
        folder = self._folder()
        os.makedirs(folder)
        try:
            sc.mount(box_folder, folder, "", sc.MS_MOVE)
        except OSError:
            os.rmdir(folder)
            raise
        kept = _on_top(layer, folder, below, set_up=below.chain.lowers == below.chain.trusted)
        self._kept[layer] = kept  # so that `close` removes it in any case
        self._kept[layer] = kept = _closed(kept)
        return kept

    def copy(
        self, layer: str, box: str, upper: str, groups: BoxGroups, below: Below
    ) -> Kept | None:
        """A copy of what a running box has written; None while it is being made."""
        if layer not in self._copies:
            self.check_free(layer)
            kept = _on_top(layer, self._folder(), below, set_up=False)
            self._begin(kept, box, below.size_max, _Work([upper], groups=groups))
        return self._finished(layer)

    def squash(self, layer: str, into: str) -> Kept | None:
        """The same files as one layer, still on what a verifier may trust; None while copying."""
        if into not in self._copies:
            self.check_free(into)
            source = self.known(layer)
            folder = self._folder()
            chain = source.chain
            own: tuple[str, ...] = (f"{folder}/upper",)
            held, trusted = frozenset({folder}), own
            if chain.lowers != chain.trusted:
                # An agent's files and the set-up's become one: the latter stay by themselves as
                # well, for verifiers.
                held, trusted = held | self._holding(chain.trusted), chain.trusted
            kept = replace(source, name=into, folder=folder, chain=Chain(own, trusted, held))
            size = sum(each.size for each in self._kept.values() if each.folder in chain.held)
            self._begin(kept, "", size + _SLACK, _Work(list(reversed(chain.lowers)), source.root))
        return self._finished(into)

    def drop(self, layer: str, used: frozenset[str]) -> bool:
        """Remove a snapshot, or what is made of one; False when there is none.

        used: what boxes hold. Raises OSError for one that is in use.
        """
        self._abandon(layer)
        if layer not in self._kept:
            return False
        if self._in_use(self._kept[layer], used):
            raise OSError(errno.EBUSY, f"snapshot {layer} is in use")
        self._orphans.discard(layer)
        _remove(self._kept.pop(layer).folder)
        self.tidy(used)
        return True

    def orphan(self, used: frozenset[str]) -> None:
        """Their service is gone: what nothing lies on goes, now and as boxes end, until `claim`."""
        for layer in list(self._copies):
            self._abandon(layer)
        self._orphans = set(self._kept)
        self.tidy(used)

    def claim(self, layers: Iterable[str]) -> None:
        """A successor goes on with these, under the same names."""
        self._orphans.difference_update(layers)

    def tidy(self, used: frozenset[str]) -> None:
        """Remove orphans that nothing lies on any more; `used`: what boxes hold."""
        while free := [name for name in self._orphans if not self._in_use(self._kept[name], used)]:
            for name in free:
                self._orphans.remove(name)
                _remove(self._kept.pop(name).folder)

    def _in_use(self, kept: Kept, used: frozenset[str]) -> bool:
        making = [copy.kept for copy in self._copies.values()]
        others = [each for each in (*self._kept.values(), *making) if each is not kept]
        return kept.folder in used.union(*(each.chain.held for each in others))

    def forget(self, box: str) -> None:
        """The box ends: no copy of it is made any more."""
        for layer in [name for name, copy in self._copies.items() if copy.box == box]:
            self._abandon(layer)

    def close(self) -> None:
        """Remove all; the boxes have ended."""
        for layer in list(self._copies):
            self._abandon(layer)
        for kept in self._kept.values():
            _remove(kept.folder)
        self._kept.clear()
        self._orphans.clear()

    def check_free(self, layer: str) -> None:
        if layer in self._kept or layer in self._copies:
            raise OSError(errno.EEXIST, f"snapshot {layer} {EXISTS}")

    def _folder(self) -> str:
        self._made += 1
        return f"{_FOLDER}/{self._made}"

    def _holding(self, lowers: tuple[str, ...]) -> frozenset[str]:
        folders = (kept.folder for kept in self._kept.values())
        return frozenset(folder for folder in folders if f"{folder}/upper" in lowers)

    def _begin(self, kept: Kept, box: str, size: int, work: _Work) -> None:
        """Fork the child that does `work` in `kept.folder`, at most `size` bytes of it."""
        os.makedirs(kept.folder)
        sc.mount("tmpfs", kept.folder, "tmpfs", _QUIET, f"size={size},nr_inodes=0,mode=0700")
        told, failed = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
            if pid == 0:
                _do(work, kept.folder, failed)
        except OSError:
            os.close(told)
            _remove(kept.folder)
            raise
        finally:
            os.close(failed)
        self._copies[kept.name] = _Copy(kept, box, pid, told, work.groups)

    def _finished(self, layer: str) -> Kept | None:
        copy = self._copies[layer]
        handle = os.pidfd_open(copy.pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(_PATIENCE_S * 1000):
                return None
        finally:
            os.close(handle)
        problem = self._collect(layer)
        if problem:
            _remove(copy.kept.folder)
            raise OSError(errno.EIO, f"snapshot {layer} could not be made: {problem}")
        self._kept[layer] = kept = _closed(copy.kept)
        return kept

    def _collect(self, layer: str) -> str:
        """Wait for a child that ends now; why it failed, if it did."""
        copy = self._copies.pop(layer)
        _, status = os.waitpid(copy.pid, 0)
        if copy.groups:
            copy.groups.thaw()  # it did so itself, unless it was killed
        problem = os.read(copy.told, 500).decode("utf-8", "replace")
        os.close(copy.told)
        return problem or (f"it ended with status {status}" if status else "")

    def _abandon(self, layer: str) -> None:
        if layer in self._copies:
            copy = self._copies[layer]
            os.kill(copy.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            self._collect(layer)
            _remove(copy.kept.folder)


def _on_top(name: str, folder: str, below: Below, *, set_up: bool) -> Kept:
    own, chain = (f"{folder}/upper",), below.chain
    trusted = own + chain.trusted if set_up else chain.trusted
    whole = Chain(own + chain.lowers, trusted, chain.held | {folder})
    return Kept(name, folder, below.base, below.root, whole, 0)


def _closed(kept: Kept) -> Kept:
    """Made read-only for good, and measured."""
    sc.mount("", kept.folder, "", sc.MS_BIND | sc.MS_REMOUNT | sc.MS_RDONLY | _QUIET)
    facts = os.statvfs(kept.folder)
    return replace(kept, size=(facts.f_blocks - facts.f_bfree) * facts.f_frsize)


def _remove(folder: str) -> None:
    sc.unmount(folder)
    os.rmdir(folder)


def _do(work: _Work, folder: str, failed: int) -> None:
    """In the forked child. Never returns."""
    status = 1
    try:
        sc.die_with_parent()
        sc.set_name("muster-copy")
        os.closerange(3, failed)
        os.closerange(failed + 1, 1 << 20)
        upper, links = f"{folder}/upper", f"{folder}/links"
        os.mkdir(upper)
        os.mkdir(links)
        _merge(work, upper, links)
        os.rmdir(links)
        status = 0
    except BaseException as error:  # noqa: BLE001 - a forked child must never return
        os.write(failed, str(error).encode()[:500])
    finally:
        os._exit(status)


def _merge(work: _Work, upper: str, links: str) -> None:
    try:
        if work.groups and not work.groups.freeze(_FREEZE_WAIT_S):
            raise TimeoutError(f"its processes did not stop within {_FREEZE_WAIT_S:g} s")
        layers.merge(work.sources, upper, links)
    finally:
        if work.groups:
            work.groups.thaw()
    if work.root:
        layers.prune(upper, work.root)
