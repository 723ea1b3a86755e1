"""The process that makes and ends boxes: one thread, a private mount namespace, blocking calls.

Owns: the instance's stage (a tmpfs that only this process and boxes see), its cgroups, and PID 1
of every box as its child. Promise: no request holds up the others for long (an end that takes its
time is answered `pending`, to be asked again); when its socket to the service closes, by a stop or
by SIGKILL, it ends every box and removes every cgroup; what a killed keeper leaves is empty
groups, and the next one sweeps them. A second keeper of the same instance is refused by a file
lock.
Does not cover: what runs in a box (boxinit.py). Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import select
import signal
import socket
import sys
from typing import Any

from services.sandbox.adapters.native import lock, pressure, rootfs, seccomp, wire
from services.sandbox.adapters.native import syscalls as sc
from services.sandbox.adapters.native.cgroups import CgroupTrouble, Tree, discover
from services.sandbox.adapters.native.spawn import Box, become_init
from services.sandbox.adapters.native.verdictfile import read_verdict

_BASE, _ROOT = "base", "root"  # below the stage; boxes are named otherwise
_QUIET = sc.MS_NOSUID | sc.MS_NODEV
_PATIENCE_S = 0.005  # how long one request may wait for processes to end
_END_WAIT_S = 10.0  # the same at the keeper's own end


class Keeper:
    """Serves one service."""

    def __init__(self, runtime_dir: str, instance: str):
        self._dir, self._stage = runtime_dir, os.path.join(runtime_dir, "stage")
        self._record = os.path.join(runtime_dir, "cgroups.json")
        self._tree = Tree(instance, discover())
        self._boxes: dict[str, Box] = {}
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._filter = seccomp.program(platform.machine())

    def open(self) -> dict[str, Any]:
        """Lock, sweep, mount the stage, build the base."""
        self._lock = lock.take(self._dir)
        swept = self._tree.sweep(self._recorded())
        sc.unshare(sc.CLONE_NEWNS)
        sc.mount("", "/", "", sc.MS_REC | sc.MS_PRIVATE)
        try:
            self._note()
            self._tree.create()
        except CgroupTrouble:
            self._tree.sweep([])
            raise
        self._note()
        os.makedirs(self._stage, exist_ok=True)
        sc.mount("tmpfs", self._stage, "tmpfs", 0, "size=64m,mode=0700")
        # From here on all paths are relative to the stage: short, and a box that reads its own
        # mount options learns nothing of the host.
        os.chdir(self._stage)
        rootfs.build_base(_BASE)
        os.mkdir(_ROOT)
        return {"ready": True, "swept": swept, "stall": pressure.told(self._tree.kill_root)}

    def _note(self) -> None:
        """Record where our groups are, for a successor that is started from elsewhere."""
        with open(self._record, "w", encoding="utf-8") as file:
            json.dump(self._tree.roots, file)

    def _recorded(self) -> list[str]:
        try:
            with open(self._record, encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return []
        return [str(path) for path in found] if isinstance(found, list) else []

    def close(self) -> None:
        """End everything and leave nothing."""
        for box in self._boxes.values():
            _kill(box)  # all at once: they end while we tidy up after the first
        for name in list(self._boxes):
            try:
                if not self._end(name, _END_WAIT_S):
                    raise TimeoutError(f"not ended in {_END_WAIT_S:g} s")
            except OSError as error:
                # The others end all the same; what is left of this one, the next keeper sweeps.
                print(f"muster-keeper: box {name}: {error}", file=sys.stderr)  # noqa: T201
        self._tree.sweep([])
        os.chdir("/")
        sc.unmount(self._stage)
        os.rmdir(self._stage)
        os.unlink(self._record)
        os.unlink(os.path.join(self._dir, "lock"))
        try:
            os.rmdir(self._dir)
        except OSError:
            pass  # it holds something of somebody else's

    def serve(self, service: socket.socket) -> None:
        """Answer requests until the service closes its end."""
        while True:
            try:
                request, _, fd = wire.receive(service)
            except (EOFError, ConnectionError):
                return
            blob = b""
            try:
                answer, blob = self._handle(request, fd)
            except (OSError, CgroupTrouble) as error:
                answer = {"error": str(error)}
            finally:
                if fd >= 0:
                    os.close(fd)
            try:
                wire.send(service, answer, blob)
            except (BrokenPipeError, ConnectionError):
                return

    def _handle(self, request: dict[str, Any], fd: int) -> tuple[dict[str, Any], bytes]:
        op, box = request["op"], str(request["box"])
        if op == "start":
            self._start(box, request, fd)
        elif op == "judge":
            self._start_verifier(box, str(request["of"]), request, fd)
        elif op == "end":
            if box not in self._boxes:
                return {"existed": False}, b""
            return ({"existed": True} if self._end(box) else {"pending": True}), b""
        elif op in ("seal", "verdict"):
            found = self._known(box)
            if not self._stop(found):
                return {"pending": True}, b""
            if op == "verdict":
                return read_verdict(found.layers.verdict)
        return {"ok": True}, b""

    def _known(self, name: str) -> Box:
        if name not in self._boxes:
            raise OSError(errno.ENOENT, f"there is no box {name}")
        return self._boxes[name]

    def _start(self, name: str, request: dict[str, Any], fd: int) -> None:
        defences = frozenset(request["defences"])
        box = self._make(name, request, defences)
        lower = _BASE if "skeleton" in defences else "/"
        box.layers = _layers(name, lower)
        self._launch(box, defences, fd)

    def _start_verifier(self, name: str, agent: str, request: dict[str, Any], fd: int) -> None:
        """A fresh box over the sealed files of `agent`, whose processes have all ended."""
        defences = frozenset(request["defences"])
        sealed = self._known(agent)
        if sealed.pid:
            raise OSError(errno.EBUSY, f"{agent} is not sealed")
        box = self._make(name, request, defences)
        if "verdict" in defences:
            verdict = os.path.join(name, "verdict")
            os.mkdir(verdict)
            sc.mount("tmpfs", verdict, "tmpfs", _QUIET, "size=1m,nr_inodes=64,mode=0755")
        else:
            # The mistake that a test shows: judge by a folder that the agent could write.
            verdict = os.path.join(sealed.layers.upper, "logs", "verifier")
            os.makedirs(verdict, exist_ok=True)
        box.layers = _layers(name, f"{sealed.layers.upper}:{_BASE}", verdict)
        if "verdict" in defences:
            rootfs.prepare_verifier(box.layers.upper)
        self._launch(box, defences, fd)

    def _make(self, name: str, request: dict[str, Any], defences: frozenset[str]) -> Box:
        """Cgroups, and a tmpfs with the box's disk limit; `_end` undoes any part of it."""
        if name in self._boxes:
            raise OSError(errno.EEXIST, f"box {name} exists")
        box = self._boxes[name] = Box(name, _BASE, self._tree.groups(name), _layers(name, _BASE))
        memory = int(request["memory_bytes"]) if "memory" in defences else 0
        pids = int(request["pids"]) if "pids" in defences else 0
        self._tree.add_box(name, memory, pids)
        os.mkdir(name)
        size, inodes = int(request["disk_bytes"]), int(request["disk_inodes"])
        # Two inodes each for the layer's own folders and overlayfs's.
        limits = f"size={size},nr_inodes={inodes + 6}" if "disk" in defences else "size=0"
        sc.mount("tmpfs", name, "tmpfs", _QUIET, f"{limits},mode=0700")
        os.mkdir(box.layers.upper, 0o755)
        os.mkdir(box.layers.work, 0o700)
        return box

    def _launch(self, box: Box, defences: frozenset[str], fd: int) -> None:
        sc.unshare(sc.CLONE_NEWPID)
        try:
            pid = os.fork()
            if pid == 0:
                become_init(box, defences, fd, self._filter)
            box.pid = pid
        finally:
            sc.setns(self._own_pids, sc.CLONE_NEWPID)

    def _stop(self, box: Box, wait_s: float = _PATIENCE_S) -> bool:
        """End every process of a box; True once none is left.

        When its PID 1 has been reaped, its whole pid namespace is gone.
        """
        if box.pid:
            _kill(box)
            if not _ended(box.pid, wait_s):
                return False
            os.waitpid(box.pid, 0)
            box.pid = 0
        return box.groups.kill_left(wait_s)

    def _end(self, name: str, wait_s: float = _PATIENCE_S) -> bool:
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
        return True


def _layers(name: str, lower: str, verdict: str = "") -> rootfs.Layers:
    # Every box mounts its root at the same place: each in a namespace of its own.
    return rootfs.Layers(_ROOT, lower, f"{name}/upper", f"{name}/work", verdict)


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


def main(runtime_dir: str, instance: str, fd: int) -> None:
    """Entry point; `fd` is the socket to the service."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the socket says when to end
    sc.set_name("muster-keeper")
    service = socket.socket(fileno=fd)
    try:
        keeper = Keeper(runtime_dir, instance)
        wire.send(service, keeper.open())
    except (OSError, CgroupTrouble) as error:
        way_out = getattr(error, "way_out", "run as root; --check-host says what is missing")
        wire.send(service, {"error": str(error), "way_out": way_out})
        return
    keeper.serve(service)
    keeper.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
