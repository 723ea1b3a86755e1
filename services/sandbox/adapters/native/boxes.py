"""What the keeper knows of its boxes: making, sealing and ending them, and what they start from.

Owns: the boxes' layers, cgroups and PID 1, all below the stage, which is the current folder.
Promise: nothing here waits longer than a few milliseconds for processes to end; whatever was made
of a box that failed half way is undone by `end`. Does not cover: who asks (keeper.py), what runs
in a box (boxinit.py). Standard library only.
"""

from __future__ import annotations

import errno
import os
import platform
import select
import signal
import socket
import stat
from typing import Any

from services.sandbox.adapters.native import rootfs, seccomp
from services.sandbox.adapters.native import syscalls as sc
from services.sandbox.adapters.native.basefolder import BaseFolders, furnish
from services.sandbox.adapters.native.cgroups import Tree
from services.sandbox.adapters.native.snapshots import Below, Kept, Snapshots
from services.sandbox.adapters.native.spawn import Box, become_init

_HOST = "host"  # the base that is made here; the others are folders of the host
# Below the stage; boxes are named otherwise. Each box mounts at the same places, in a namespace of
# its own.
_BASE, _ROOT, _VIEW = "base", "root", "view"
_OWN_INODES = 32  # of a fresh layer: folders that are mounted on or hidden, and overlayfs's own
_QUIET = sc.MS_NOSUID | sc.MS_NODEV
_PATIENCE_S = 0.005  # how long one request may wait for processes to end


class Boxes:
    """Of one keeper; every method but `kill_all` may raise OSError or CgroupTrouble."""

    def __init__(self, tree: Tree):
        self._tree = tree
        self._boxes: dict[str, Box] = {}
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._filter = seccomp.program(platform.machine())
        self._snapshots = Snapshots()
        self._folders = BaseFolders()
        self._host: rootfs.Base

    def open_stage(self) -> None:
        """Build the base below the current folder."""
        self._host = rootfs.build_base(_BASE)
        os.mkdir(_ROOT)
        os.mkdir(_VIEW)

    def close(self) -> None:
        """Remove what boxes started from; they have ended."""
        self._snapshots.close()

    def orphan_snapshots(self) -> None:
        """Their service is gone: those that no box lies on go, and the others with their boxes."""
        self._snapshots.orphan(self._used())

    def claim_snapshots(self, layers: list[str]) -> None:
        """A successor goes on with these; the others go, now or with the last box on them."""
        self._snapshots.claim(layers)
        self._snapshots.tidy(self._used())

    def _used(self) -> frozenset[str]:
        return frozenset().union(*(box.below.chain.held for box in self._boxes.values()))

    def handle(self, op: str, box: str, request: dict[str, Any], fd: int) -> dict[str, Any] | None:
        """Answer what is asked of a box or a snapshot; None when that is not known here."""
        if op == "start":
            self.start(box, request, fd)
        elif op == "judge":
            self.start_verifier(box, str(request["of"]), request, fd)
        elif op == "snapshot":
            return self._told(self._snapshot(box, str(request["layer"]), bool(request["keep"])))
        elif op == "squash":
            return self._told(self._snapshots.squash(str(request["layer"]), str(request["into"])))
        elif op == "drop":
            return {"existed": self._snapshots.drop(str(request["layer"]), self._used())}
        else:
            return None
        return {"ok": True}

    @staticmethod
    def _told(kept: Kept | None) -> dict[str, Any]:
        return dict(kept.told()) if kept else {"pending": True}

    def _snapshot(self, name: str, layer: str, keep: bool) -> Kept | None:
        """None while it is being made, or while the box still ends."""
        box = self._known(name)
        if not box.pid and not (box.leaving and not keep):
            raise OSError(errno.EINVAL, f"{name} is sealed")
        if keep:
            upper = box.layers.upper
            return self._snapshots.copy(layer, name, upper, box.groups, box.below)
        self._snapshots.check_free(layer)
        box.leaving = True
        if not self._stop(box):
            return None
        kept = self._snapshots.adopt(layer, box.folder, box.below)
        self.end(name)  # if its groups take long to go, by the next one who asks
        return kept

    @property
    def names(self) -> list[str]:
        return list(self._boxes)

    def kill_all(self) -> None:
        """Kill every box; waits for nothing."""
        for box in self._boxes.values():
            _kill(box)

    def stop(self, name: str) -> bool:
        """End every process of a box, whose files stay; False while some live on."""
        return self._stop(self._known(name))

    def hand_over(self, name: str, fd: int) -> bool:
        """Give the control of a box to the service at the other end of `fd`; False when no process
        of it is left: it is sealed, or its PID 1 was killed."""
        box = self._known(name)
        if not box.pid or not box.door:
            return False
        try:
            socket.send_fds(box.door, [b"control"], [fd])
        except BrokenPipeError:
            return False
        return True

    def verdict_folder(self, name: str) -> str:
        return self._known(name).layers.verdict

    def _known(self, name: str) -> Box:
        if name not in self._boxes:
            raise OSError(errno.ENOENT, f"there is no box {name}")
        return self._boxes[name]

    def start(self, name: str, request: dict[str, Any], fd: int) -> None:
        defences = frozenset(request["defences"])
        box = self._make(name, request, self._base(request), self._below(request), defences)
        lowers = (*box.below.chain.lowers, box.base.folder if "skeleton" in defences else "/")
        box.layers = _layers(name, lowers)
        self._take_root(box)
        if not box.below.chain.lowers and box.base != self._host:
            furnish(box.base.folder, box.layers.upper)
        self._launch(box, defences, fd)

    def start_verifier(self, name: str, agent: str, request: dict[str, Any], fd: int) -> None:
        """A fresh box over the sealed files of `agent`, whose processes have all ended; or, if
        `live` is asked for, beside it, over what it started from."""
        defences = frozenset(request["defences"])
        live, of = bool(request["live"]), self._known(agent)
        if bool(of.pid) != live:
            raise OSError(errno.EBUSY, f"{agent} is {'' if live else 'not '}sealed")
        box = self._make(name, request, of.base, of.below, defences)
        trusted = (*of.below.chain.trusted, of.base.folder)
        lowers = trusted
        if not live:
            lowers = (of.layers.upper, *of.below.chain.lowers, of.base.folder)
        if "verdict" in defences:
            verdict = os.path.join(name, "verdict")
            os.mkdir(verdict)
            sc.mount("tmpfs", verdict, "tmpfs", _QUIET, "size=1m,nr_inodes=64,mode=0755")
            box.layers = _layers(name, lowers, verdict, trusted)
        else:
            # The mistake that a test shows: judge by a folder that the agent could write.
            verdict = os.path.join(of.layers.upper, "logs", "verifier")
            os.makedirs(verdict, exist_ok=True)
            box.layers = _layers(name, lowers, verdict)
        network = os.open(f"/proc/{of.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC) if live else -1
        try:
            self._launch(box, defences, fd, network)
        finally:
            if live:
                os.close(network)

    def _below(self, request: dict[str, Any]) -> Below:
        base, layer = str(request["base"]), str(request["layer"])
        size = int(request["disk_bytes"])
        root = self._base(request).folder
        return Below(base, root, self._snapshots.chain(layer, base), size)

    def _base(self, request: dict[str, Any]) -> rootfs.Base:
        if request["base"] == _HOST:
            return self._host
        return rootfs.Base(self._folders.path(str(request["base"]), str(request["folder"])))

    def _take_root(self, box: Box) -> None:
        """The box's own layer decides who may enter `/`: as below it."""
        facts = os.stat((*box.below.chain.lowers, box.base.folder)[0])
        os.chown(box.layers.upper, facts.st_uid, facts.st_gid)
        os.chmod(box.layers.upper, stat.S_IMODE(facts.st_mode))

    def _make(
        self,
        name: str,
        request: dict[str, Any],
        base: rootfs.Base,
        below: Below,
        defences: frozenset[str],
    ) -> Box:
        """Cgroups, and a tmpfs with the box's disk limit; `end` undoes any part of it."""
        if name in self._boxes:
            raise OSError(errno.EEXIST, f"box {name} exists")
        groups = self._tree.groups(name)
        box = self._boxes[name] = Box(name, base, groups, _layers(name, ()), below)
        memory = int(request["memory_bytes"]) if "memory" in defences else 0
        pids = int(request["pids"]) if "pids" in defences else 0
        self._tree.add_box(name, memory, pids, float(request["cpus"]))
        os.mkdir(name)
        size, inodes = int(request["disk_bytes"]), int(request["disk_inodes"])
        limits = f"size={size},nr_inodes={inodes + _OWN_INODES}" if "disk" in defences else "size=0"
        sc.mount("tmpfs", name, "tmpfs", _QUIET, f"{limits},mode=0700")
        os.mkdir(box.layers.upper, 0o755)
        os.mkdir(box.layers.work, 0o700)
        return box

    def _launch(self, box: Box, defences: frozenset[str], fd: int, network: int = -1) -> None:
        if "processes" in defences:
            sc.unshare(sc.CLONE_NEWPID)
        box.door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        box.door.setblocking(False)
        try:
            pid = os.fork()
            if pid == 0:
                become_init(box, defences, fd, theirs, self._filter, network)
            box.pid = pid
        finally:
            theirs.close()
            sc.setns(self._own_pids, sc.CLONE_NEWPID)

    def _stop(self, box: Box, wait_s: float = _PATIENCE_S) -> bool:
        """End every process of a box; True once none is left.

        When its PID 1 has been reaped, its whole pid namespace is gone.
        """
        if box.pid:
            self._snapshots.forget(box.folder)
            _kill(box)
            if not _ended(box.pid, wait_s):
                return False
            os.waitpid(box.pid, 0)
            box.pid = 0
            if box.door:
                box.door.close()
        return box.groups.kill_left(wait_s)

    def end(self, name: str, wait_s: float = _PATIENCE_S) -> bool:
        """Remove all of a box; False when its end takes longer than `wait_s`: ask again."""
        box = self._boxes[name]
        if not self._stop(box, wait_s):
            return False
        for path in (os.path.join(box.folder, "verdict"), box.folder):
            if os.path.ismount(path):
                sc.unmount(path)
        if os.path.isdir(box.folder):
            os.rmdir(box.folder)
        if not box.groups.remove(wait_s):
            return False
        del self._boxes[name]
        self._snapshots.tidy(self._used())
        return True


def _layers(
    name: str, lowers: tuple[str, ...], verdict: str = "", trusted: tuple[str, ...] = ()
) -> rootfs.Layers:
    lower, tools = ":".join(lowers), ":".join(trusted)
    return rootfs.Layers(_ROOT, lower, f"{name}/upper", f"{name}/work", verdict, tools, _VIEW)


def _kill(box: Box) -> None:
    """SIGKILL its PID 1, our child, and with it the whole pid namespace; waits for nothing."""
    if box.pid:
        os.kill(box.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own


def _ended(pid: int, wait_s: float) -> bool:
    """Whether our child has ended within `wait_s`."""
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))
    finally:
        os.close(handle)
